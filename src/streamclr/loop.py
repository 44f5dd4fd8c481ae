"""The loop around the learner: journal, checkpoints, and what a device meets that learns for weeks."""

import dataclasses
import math
import os
import signal
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamclr.checkpoint import Pace, json_line
from streamclr.classifier import curve_point
from streamclr.errors import NotFinite, UserError
from streamclr.guard import Guarded
from streamclr.learner import Learner, Step
from streamclr.metrics import Metrics, of_account, of_step
from streamclr.progress import Progress, say
from streamclr.service import Notifier

if TYPE_CHECKING:
    from streamclr.run import RunConfig, RunDirectory
    from streamclr.stream import AnyStream

MOST_IN_A_ROW = 3  # steps that are undone, or returns to one checkpoint, before the run stops
COLLAPSED, N_COLLAPSED = 1e-3, 20  # a spread below this in so many steps in a row is told
TELL_EVERY = 60.0  # seconds between two events on rejected frames


def learn(config: "RunConfig", learner: Learner, stream: "AnyStream", directory: "RunDirectory") -> float:
    """Every segment of the stream goes to the learner, every step into the journal. Returns the seconds of learning.

    It goes on from the last checkpoint of the directory, if there is one; the steps after that are redone. So it does
    when the learner's own numbers are no longer finite.
    """
    n_returns: dict[int, int] = {}
    with StopSignal() as asked:
        while True:
            try:
                return Loop(config, learner, stream, directory, asked).run()
            except Damaged as error:
                last = directory.checkpoints.latest()
                if last is None:
                    raise UserError(f"{error}, and there is no checkpoint to go back to") from None
                number = last[0]
                if asked.signal:
                    raise Stopped(asked.signal, f"{error}: stopped, with step {number} saved") from None
                n_returns[number] = n_returns.get(number, 0) + 1
                if n_returns[number] == MOST_IN_A_ROW:
                    often = f"{MOST_IN_A_ROW} times after step {number}"
                    raise UserError(f"{error}, {often}: the run stops there") from None
                directory.tell(f"{error}: back to step {number}", step=number)


class Damaged(Exception):
    """The learner's weights, statistics or moments are not finite."""


class Stopped(Exception):
    """A signal asked the run to stop, and it has, after a checkpoint."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + number


class Loop:
    """One go at a run, from its last checkpoint on."""

    def __init__(
        self,
        config: "RunConfig",
        learner: Learner,
        stream: "AnyStream",
        directory: "RunDirectory",
        asked: "StopSignal",
    ):
        self.asked = asked
        self.config, self.learner, self.stream, self.directory = config, learner, stream, directory
        assert config.segment is not None
        n_steps = math.inf if config.images is None else -(-config.images // config.segment)
        self.mix_every = max(1, n_steps // 200) if n_steps < math.inf else 1000
        self.curve_every = -(-n_steps // max(1, config.probes))
        self.n_undone = self.n_undone_in_a_row = self.n_collapsed = 0
        self.told = -math.inf  # when the account was

    def run(self) -> float:
        config, stream = self.config, self.stream
        assert config.segment is not None
        self.seconds = self.directory.restore(self.learner, stream)
        self.n_told = stream.account.rejected.total()
        self.notifier = Notifier()
        with ExitStack() as stack:
            self.metrics = None if config.metrics is None else stack.enter_context(closing(Metrics(config.metrics)))
            if self.metrics:
                say(f"metrics: http://127.0.0.1:{self.metrics.port}/metrics")
            self.journal = stack.enter_context(closing(Journal(self.directory.path / "journal.jsonl")))
            self.checkpoints = Pace(self.directory.checkpoints, config.checkpoint_minutes, config.checkpoint_steps)
            every = 10 if config.images else 600  # seconds: a run for weeks has a log for weeks
            bar = stack.enter_context(Progress(f"learning ({config.policy})", config.images, every))
            bar.advance(stream.position)
            stream.idle = self._idle
            self.notifier.ready()
            with closing(stream.segments(config.segment, until=config.images)) as segments:
                for images in segments:
                    step = self._step(images)
                    bar.advance(len(images), str(step or "undone"))
                    is_due = self.checkpoints.due()
                    if self.asked.signal:
                        break
                    if is_due:
                        self._save()
                    self._rest(step)
            self._tell_of_the_stream(now=True)
            saved = self._save()
        if self.asked.signal:
            self.notifier.stopping()
            how = (
                f"streamclr run with the same options and --out {self.directory.path} goes on" if saved else "not saved"
            )
            raise Stopped(self.asked.signal, f"stopped after step {self.learner.n_steps}: {how}")
        return self.seconds

    def _step(self, images: Any) -> Step | None:
        """One step and its line in the journal; None if it was undone."""
        try:
            step = self.learner.learn_many(images)
        except NotFinite as error:
            self._undone(str(error), len(images))
            return None
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise UserError("no memory for a step: use --memory, a smaller --batch or fewer other programs") from None
        self.n_undone_in_a_row = 0
        self.seconds += step.seconds_scoring + step.seconds_training
        line: dict[str, Any] = dataclasses.asdict(step)
        source = self.stream.source
        if source.classes and step.number % self.mix_every == 0:
            labels = self.stream.labels(self.learner.buffer.arrivals.cpu())
            line["classes"] = labels.bincount(minlength=len(source.classes)).tolist()
        at_end = self.config.images is not None and self.stream.position >= self.config.images
        is_due = self.config.probes and (step.number % self.curve_every == 0 or at_end)
        if source.train and source.test and is_due:
            line["accuracy"] = curve_point(self.learner.model, source.train, source.test)
        if isinstance(self.learner.policy, Guarded):
            line["kept_out"] = dict(self.learner.policy.kept_out)
        self.journal.write(line)
        self._watch(step)
        return step

    def _undone(self, why: str, n_images: int) -> None:
        self.n_undone += 1
        self.n_undone_in_a_row += 1
        account = self.stream.account
        account.learned -= n_images
        account.passed["undone"] += n_images
        self.directory.tell(f"step undone: {why}", step=self.learner.n_steps)
        if not self.learner.is_finite():
            raise Damaged(why)
        if self.n_undone_in_a_row == MOST_IN_A_ROW:
            raise UserError(f"{why}; {MOST_IN_A_ROW} steps in a row were undone: the run stops")

    def _watch(self, step: Step) -> None:
        """What somebody who looks after the device should know."""
        self.n_collapsed = self.n_collapsed + 1 if step.spread < COLLAPSED else 0
        if self.n_collapsed == N_COLLAPSED:
            self.directory.tell(f"collapse: all projections are alike (spread {step.spread:.1g})", step=step.number)
        self._tell_of_the_stream()
        self.notifier.alive(str(step))
        if self.metrics:
            self.metrics.update(**of_step(step))

    def _tell_of_the_stream(self, now: bool = False) -> None:
        """Connections that were lost, at once; rejected frames now and then, not one by one."""
        for source, event in self.stream.take_events():
            self.directory.tell(f"{source}: {event}", step=self.learner.n_steps)
        account = self.stream.account
        if account.rejected.total() > self.n_told and (now or time.monotonic() - self.told > TELL_EVERY):
            self.n_told, self.told = account.rejected.total(), time.monotonic()
            self.directory.tell(str(account), step=self.learner.n_steps)
        if self.metrics:
            connections = self.stream.connections()
            self.metrics.update(
                **of_account(account),
                steps_undone_total=self.n_undone,
                checkpoint_step=self.checkpoints.last,
                checkpoint_failures_total=self.checkpoints.n_failed,
                source_connected={name: float(is_up) for name, (is_up, _) in connections.items()},
                source_disconnects_total={name: n for name, (_, n) in connections.items()},
            )

    def _idle(self) -> bool:
        """While there is nothing to learn from: True ends the run."""
        self.notifier.alive()
        self._tell_of_the_stream()
        return bool(self.asked.signal)

    def _rest(self, step: Step | None) -> None:
        """A device that has other work to do learns only part of the time."""
        if step is None or self.config.duty_share == 1:
            return
        spent = step.seconds_scoring + step.seconds_training
        until = time.monotonic() + spent * (1 / self.config.duty_share - 1)
        while (left := until - time.monotonic()) > 0 and not self._idle():
            time.sleep(min(1.0, left))

    def _save(self) -> bool:
        """A checkpoint, in which nothing is ever infinite or no number; False if the disk would not take it."""
        if self.learner.n_steps == self.checkpoints.last:
            return True  # nothing was learned since, and a checkpoint is never written over
        if not self.learner.is_finite():
            raise Damaged(f"weights, statistics or moments are not finite after step {self.learner.n_steps}")
        try:
            journal_bytes = self.journal.sync()
        except OSError as error:
            return self.checkpoints.failed(self.learner.n_steps, error)
        state = {
            "learner": self.learner.state_dict(copy=False),
            "stream": self.stream.state_dict(),
            "seconds": self.seconds,
            "journal_bytes": journal_bytes,
        }
        return self.checkpoints.save(self.learner.n_steps, state)


class Journal:
    """A JSON line per step. A disk that is full costs lines, not the run; no line is ever broken."""

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._fails = False

    def write(self, line: dict[str, Any]) -> None:
        content = json_line(line).encode()
        try:
            if self._fails:
                os.truncate(self._file.fileno(), self._size)  # what was left of the line before
            if os.write(self._file.fileno(), content) < len(content):
                raise OSError(0, "the disk is full")
            self._size += len(content)
            self._fails = False
        except OSError as error:
            if not self._fails:
                say(f"streamclr: the journal cannot be written ({error.strerror}): going on")
            self._fails = True

    def sync(self) -> int:
        """Its size, all of which is on the disk."""
        if self._fails:
            os.truncate(self._file.fileno(), self._size)
        os.fsync(self._file.fileno())
        return self._size

    def close(self) -> None:
        self._file.close()


class StopSignal:
    """SIGTERM and SIGINT (Ctrl-C) end the loop after the step at hand; the second one at once."""

    signal = 0

    def __enter__(self) -> "StopSignal":
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _note(self, number: int, _: object) -> None:
        self.signal = number
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
