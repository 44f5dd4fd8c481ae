"""The loop around the learner: journal, checkpoints, and what a device meets that learns for weeks."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, closing, suppress
from typing import Any

from streamclr.base.errors import LostRank, NotFinite, UserError
from streamclr.base.progress import Progress, say
from streamclr.guards import Guarded
from streamclr.labelling.candidates import open_candidates
from streamclr.learner import Learner, Step
from streamclr.models.versions import Versions
from streamclr.records.checkpoints import Pace
from streamclr.records.directory import RunDirectory
from streamclr.records.journal import Journal
from streamclr.records.plan import RunPlan
from streamclr.runs.challenger import Challenger, labels_at_hand
from streamclr.runs.evaluation import curve_point
from streamclr.runs.metrics import Metrics, of_account, of_served, of_step
from streamclr.runs.service import Notifier, StopSignal
from streamclr.runs.serving import PredictingStream
from streamclr.runs.status import Server, Window, memory
from streamclr.streams.stream import Stream

MOST_IN_A_ROW = 3  # steps that are undone, or returns to one checkpoint, before the run stops
COLLAPSED, N_COLLAPSED = 1e-3, 20  # a spread below this in so many steps in a row is told
TELL_EVERY = 60.0  # seconds between two events on rejected frames
# What a rank has of its next segment. All go on when all have it, and end when one of them has none any more.
HERE, COMING, AWAITED, ENDED = range(4)  # `COMING` for certain, as that of a recording


def learn_stream(config: RunPlan, learner: Learner, stream: Stream, directory: RunDirectory) -> float:
    """Every segment of the stream goes to the learner, every step into the journal. Returns the seconds of learning.

    It goes on from the last checkpoint of the directory, if there is one; the steps after that are redone. So it does
    when the learner's own numbers are no longer finite.
    """
    n_returns: Counter[int] = Counter()  # by step
    with StopSignal(learner.ranks.n > 1) as asked:
        while True:
            loop = Loop(config, learner, stream, directory, asked)
            try:
                return loop.run()
            except LostRank as error:
                # A rank may be lost while the others agree on a checkpoint, and not all of them hear of it.
                after = f"goes on after step {loop.saved} or a later one" if loop.saved else "has no checkpoint yet"
                raise LostRank(f"{error}: start it again with the same command, it {after}") from None
            except Damaged as error:
                last = directory.latest(learner.ranks)
                with learner.ranks.together():
                    if last is None:
                        raise UserError(f"{error}, and there is no checkpoint to go back to") from None
                    number = last[0]
                    n_returns[number] += 1
                    if n_returns[number] == MOST_IN_A_ROW:
                        often = f"{MOST_IN_A_ROW} times after step {number}"
                        raise UserError(f"{error}, {often}: the run stops there") from None
                if asked.by_any(learner.ranks):
                    raise asked.stopped(learner.ranks, f"{error}: stopped, with step {number} saved") from None
                directory.tell(f"{error}: back to step {number}", step=number)


class Damaged(Exception):
    """The learner's weights, statistics or moments are not finite."""


class Loop:
    """One go at a run, from its last checkpoint on."""

    def __init__(self, config: RunPlan, learner: Learner, stream: Stream, directory: RunDirectory, asked: StopSignal):
        self.asked = asked
        self.served = Versions(directory, self._tell) if config.predict else None
        if self.served is not None:
            stream = PredictingStream(stream, self.served, directory.path / "predictions.jsonl")
        self.config, self.learner, self.stream, self.directory = config, learner, stream, directory
        self.ranks = learner.ranks
        self.challenger: Challenger | None = None
        n_steps = math.inf if config.images is None else -(-config.images // config.segment)
        self.mix_every = max(1, n_steps // 200) if n_steps < math.inf else 1000
        self.curve_every = -(-n_steps // max(1, config.probes))
        self.n_undone = self.n_undone_in_a_row = self.n_collapsed = 0
        self.is_over = False  # one rank at least has no segment any more, or is to stop before it comes
        self.saved = (directory.checkpoints.numbers() or [0])[-1]  # the last step of which all ranks have a checkpoint
        self.told = -math.inf  # when the account was
        self.window = Window(directory, learner, stream)

    def run(self) -> float:
        config, stream = self.config, self.stream
        self.seconds = self.directory.restore(self.learner, stream)
        self.saved = self.learner.n_steps
        self.n_told = stream.account.rejected.total()
        self.notifier = Notifier()
        with ExitStack() as stack:
            self.metrics = None if config.metrics is None else stack.enter_context(closing(Metrics(config.metrics)))
            if self.metrics:
                say(f"metrics: http://127.0.0.1:{self.metrics.port}/metrics")
            self.candidates = open_candidates(self.directory.path, config)
            if self.candidates:
                stack.enter_context(closing(self.candidates))
            if config.serve:
                stack.enter_context(closing(Server(self.directory.path)))
            self.journal = stack.enter_context(closing(Journal(self.directory.path / "journal.jsonl")))
            minutes, steps, is_first = config.checkpoint_minutes, config.checkpoint_steps, self.ranks.index == 0
            self.checkpoints = Pace(self.directory.checkpoints, minutes, steps, quiet=not is_first)
            every = 10 if config.images else 600  # seconds: a run for weeks has a log for weeks
            progress = Progress(f"learning ({config.policy})", config.images, every, quiet=not is_first)
            bar = stack.enter_context(progress)
            bar.advance(stream.position)
            if self.served is not None:
                self.served.look()
                labels = labels_at_hand(config, self.directory.path, stream)
                challenger = Challenger(labels, self.served, self.directory.model_with, self._tell)
                self.challenger = stack.enter_context(closing(challenger))
            self.notifier.ready()
            with closing(self._segments()) as segments:
                for images in segments:
                    step = self._step(images)
                    bar.advance(len(images), str(step or "undone"))
                    (is_due,) = self.ranks.largest(self.checkpoints.due())
                    if self.asked.by_any(self.ranks):
                        break
                    if is_due:
                        self._save()
                    self._challenge()
                    self._rest(step)
            self._tell_of_the_stream(now=True)
            saved = self._save()
            self._challenge_for_the_last_time()
            self._show(now=True)
        if self.asked.by_any(self.ranks):
            self.notifier.stopping()
            with suppress(OSError, UserError):  # what the dashboard of a stopped run shows
                self.directory.save_buffer(self.learner, self.stream)
            again = f"streamclr run with the same options and --out {self.directory.path} goes on"
            message = f"stopped after step {self.learner.n_steps}: {again if saved else 'not saved'}"
            raise self.asked.stopped(self.ranks, message)
        return self.seconds

    def _segments(self) -> Generator[Any]:
        """Those of the stream, as long as every rank has a whole one; without other ranks the last may be smaller."""
        size = self.config.segment
        with closing(self.stream.segments(size, until=self.config.images, idle=self._wait)) as segments:
            for images in segments:
                if not self._meet(HERE if len(images) == size or self.ranks.n == 1 else ENDED):
                    self.stream.account.pass_over(len(images), "no segment on another rank")
                    return
                yield images
        if not self.is_over:
            self._meet(ENDED)

    def _meet(self, state: int) -> bool:
        """Wait for all ranks' segments, or, as long as this rank has none, only look in; False if the run is over."""
        while True:
            worst, number = self.ranks.largest(state, self.asked.signal)
            if worst == ENDED or (worst == AWAITED and number):
                self.is_over, self.asked.signal = True, int(number)
                return False
            if worst == HERE or state != HERE:
                return True
            self._idle()

    def _wait(self) -> bool:
        """While there is nothing to learn from: True ends the run."""
        self._idle()
        # Another rank may have read its segment already, and a recording on it must not lose that.
        return not self._meet(COMING if self.ranks.n > 1 and self.stream.exact else AWAITED)

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
        line: dict[str, Any] = dataclasses.asdict(step) | {"time": round(time.time(), 3), "memory": memory()}
        stream = self.stream
        if stream.classes and step.number % self.mix_every == 0:
            labels = stream.labels(self.learner.buffer.arrivals.cpu())
            line["classes"] = labels.bincount(minlength=len(stream.classes)).tolist()
        at_end = self.config.images is not None and stream.position >= self.config.images
        is_due = self.config.probes and (step.number % self.curve_every == 0 or at_end)
        if stream.train and stream.test and is_due:
            line["accuracy"] = curve_point(self.learner.model, stream.train, stream.test)
        if isinstance(self.learner.policy, Guarded):
            line["kept_out"] = dict(self.learner.policy.kept_out)
        if self.served is not None:
            line["served"] = self.served.current.number if self.served.current else None
        self.journal.write(line)
        self._offer(images)
        self._watch(step)
        return step

    def _offer(self, images: Any) -> None:
        """To the draw of the images that a person may be asked about."""
        if self.candidates:
            try:
                self.candidates.offer(images, self.learner.buffer.n_seen - len(images))
            except OSError as error:
                self._tell(f"the label queue cannot be written ({error.strerror})")
                self.candidates = None

    def _undone(self, why: str, n_images: int) -> None:
        self.n_undone += 1
        self.n_undone_in_a_row += 1
        self.stream.account.pass_over(n_images, "undone")
        self._tell(f"step undone: {why}")
        if not self.learner.is_finite():
            raise Damaged(why)
        with self.ranks.together():
            if self.n_undone_in_a_row == MOST_IN_A_ROW:
                raise UserError(f"{why}; {MOST_IN_A_ROW} steps in a row were undone: the run stops")

    def _watch(self, step: Step) -> None:
        """What somebody who looks after the device should know."""
        self.n_collapsed = self.n_collapsed + 1 if step.spread < COLLAPSED else 0
        if self.n_collapsed == N_COLLAPSED:
            self._tell(f"collapse: all projections are alike (spread {step.spread:.1g})")
        self._tell_of_the_stream()
        self.notifier.alive(str(step))
        if self.metrics:
            self.metrics.update(**of_step(step))
        self._show()

    def _show(self, now: bool = False) -> None:
        policy = self.learner.policy
        self.window.update(
            now,
            checkpoint=self.saved or None,
            checkpoint_failures=self.checkpoints.n_failed,
            undone=self.n_undone,
            kept_out=dict(policy.kept_out) if isinstance(policy, Guarded) else None,
            served=self._about_served(),
        )

    def _about_served(self) -> dict[str, Any] | None:
        return self.served.current.about() if self.served is not None and self.served.current else None

    def _tell_of_the_stream(self, now: bool = False) -> None:
        """Connections that were lost, at once; rejected frames now and then, not one by one."""
        for source, event in self.stream.take_events():
            self._tell(f"{source}: {event}")
        account = self.stream.account
        if account.rejected.total() > self.n_told and (now or time.monotonic() - self.told > TELL_EVERY):
            self.n_told, self.told = account.rejected.total(), time.monotonic()
            self._tell(str(account))
        if self.metrics:
            connections = self.stream.connections()
            self.metrics.update(
                **of_account(account),
                steps_undone_total=self.n_undone,
                checkpoint_step=self.saved,
                checkpoint_failures_total=self.checkpoints.n_failed,
                source_connected={name: float(is_up) for name, (is_up, _) in connections.items()},
                source_disconnects_total={name: n for name, (_, n) in connections.items()},
            )
            if self.challenger:
                heads = {"taken": self.challenger.n_taken, "refused": self.challenger.n_refused}
                self.metrics.update(**of_served(self._about_served()), challengers_total=heads)

    def _idle(self) -> None:
        """What goes on while nothing is learned."""
        self.notifier.alive()
        self._tell_of_the_stream()
        self._challenge()
        self._show()

    def _rest(self, step: Step | None) -> None:
        """A device that has other work to do learns only part of the time."""
        if step is None or self.config.duty_share == 1:
            return
        spent = step.seconds_scoring + step.seconds_training
        until = time.monotonic() + spent * (1 / self.config.duty_share - 1)
        while not self.asked.by_any(self.ranks):
            (left,) = self.ranks.largest(until - time.monotonic())
            if left <= 0:
                break
            self._idle()
            time.sleep(min(1.0, left))

    def _save(self) -> bool:
        """A checkpoint, in which nothing is ever infinite or no number; False if the disk would not take it.

        One that another rank could not write is of no use: it would only take the place of those that all have.
        """
        if self.learner.n_steps == self.saved:
            return True  # nothing was learned since, and a checkpoint is never written over
        if not self.learner.is_finite():
            raise Damaged(f"weights, statistics or moments are not finite after step {self.learner.n_steps}")
        (has_failed,) = self.ranks.largest(not self._save_own())
        if has_failed:
            self.directory.checkpoints.drop_after(self.saved)
            return False
        self.saved = self.learner.n_steps
        if self.challenger:
            self.challenger.due()
        return True

    def _save_own(self) -> bool:
        """What this rank has."""
        try:
            state = {
                "learner": self.learner.state_dict(copy=False),
                "stream": self.stream.state_dict(),
                "seconds": self.seconds,
                "journal_bytes": self.journal.sync(),
                "ranks": self.ranks.n,
            }
        except OSError as error:
            return self.checkpoints.failed(self.learner.n_steps, error)
        return self.checkpoints.save(self.learner.n_steps, state)

    def _challenge(self) -> None:
        """A copy of the encoder for a new head, if one is wanted."""
        if self.challenger and not self.challenger.is_busy and self.challenger.wants and self.learner.is_finite():
            weights = self.learner.model.state_dict()
            self.challenger.give(self.learner.n_steps, {name: tensor.clone() for name, tensor in weights.items()})

    def _challenge_for_the_last_time(self) -> None:
        """With the encoder as it is in the end, and all labels; not for one who asked to stop."""
        if self.challenger and not self.asked.signal:
            self.challenger.due()
            while (self.challenger.is_busy or self.challenger.wants) and not self.asked.signal:
                self._idle()
                time.sleep(0.05)

    def _tell(self, event: str) -> None:
        self.directory.tell(event, step=self.learner.n_steps)
