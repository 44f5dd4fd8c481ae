"""The loop around the learner: journal, checkpoints, stop signals, and recovery from numbers that are not finite."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, closing, suppress
from typing import Any

import torch
from torch import Tensor

from streamclr.answers.answers import Answers
from streamclr.base.errors import LostRank, NotFinite, QuietExit, UserError
from streamclr.base.progress import Progress, say
from streamclr.guards import Guarded
from streamclr.labelling.candidates import UNKNOWN, open_candidates
from streamclr.learner import Learner
from streamclr.models.versions import Versions
from streamclr.records.checkpoints import Pace
from streamclr.records.directory import RunDirectory
from streamclr.records.journal import Journal
from streamclr.records.plan import RunPlan
from streamclr.runs.challenger import Challenger, labels_at_hand
from streamclr.runs.evaluation import MAX_PROBE_LABELS, MAX_PROBE_TESTED, curve_point
from streamclr.runs.metrics import Metrics, of_account, of_answers, of_served, of_step
from streamclr.runs.next_step import next_step
from streamclr.runs.service import Notifier, StopSignal
from streamclr.runs.serving import PredictingStream
from streamclr.runs.status import Window, memory
from streamclr.step import Step
from streamclr.streams.spec import split_source
from streamclr.streams.stream import Stream

MAX_IN_A_ROW = 3  # undone steps, or returns to one checkpoint, before the run stops
COLLAPSED_SPREAD, N_COLLAPSED = 1e-3, 20  # a spread below the first in that many steps in a row is reported
USUAL_PROBES, PROBING = 10, 0.1  # points of the learning curve, and the share of the time that they may take
REPORT_SECONDS = 60.0  # between two events about rejected frames
# The state of a rank's next segment. A step starts when every rank has one; the run ends when one rank has no more.
HERE, COMING, AWAITED, ENDED = range(4)  # COMING: certain to come, from a recording; AWAITED: from a camera


def learn_stream(plan: RunPlan, learner: Learner, stream: Stream, directory: RunDirectory) -> float:
    """Give every segment of the stream to the learner and write every step to the journal. Returns seconds of learning.

    It starts from the last checkpoint of the directory, if there is one. If the learner's own numbers are no longer
    finite, it returns to that checkpoint.
    """
    n_returns: Counter[int] = Counter()  # by step
    with StopSignal(learner.ranks.n > 1) as asked:
        while True:
            loop = Loop(plan, learner, stream, directory, asked)
            try:
                return loop.run()
            except LostRank as error:
                # A rank may be lost while a checkpoint is agreed on, so that not every rank knows of it.
                after = f"goes on after step {loop.saved} or a later one" if loop.saved else "has no checkpoint yet"
                raise LostRank(f"{error}: start it again with the same command, it {after}") from None
            except Damaged as error:
                last = directory.latest(learner.ranks)
                with learner.ranks.together():
                    if last is None:
                        raise UserError(f"{error}, and there is no checkpoint to go back to") from None
                    number = last[0]
                    n_returns[number] += 1
                    if n_returns[number] == MAX_IN_A_ROW:
                        often = f"{MAX_IN_A_ROW} times after step {number}"
                        raise UserError(f"{error}, {often}: the run stops there") from None
                if asked.by_any(learner.ranks):
                    raise asked.stopped(learner.ranks, f"{error}: stopped, with step {number} saved") from None
                directory.tell(f"{error}: back to step {number}", step=number)


class Damaged(Exception):
    """The learner's weights, statistics or moments are not finite."""


class Loop:
    """One attempt at a run, from its last checkpoint."""

    def __init__(self, plan: RunPlan, learner: Learner, stream: Stream, directory: RunDirectory, asked: StopSignal):
        self.asked = asked
        self.served = Versions(directory, self._tell) if plan.predict else None
        path = directory.path
        self.answers: Answers | None = None
        if plan.to:
            places = list(stream.places.values())
            self.answers = Answers(plan, path / "answers", path, places, stream.repeats, self._tell)
        if self.served is not None:
            predictions = path / "predictions.jsonl"
            stream = PredictingStream(stream, self.served, predictions, self.answers, directory.log_bytes)
        self.plan, self.learner, self.stream, self.directory = plan, learner, stream, directory
        self.ranks = learner.ranks
        self.challenger: Challenger | None = None
        n_steps = math.inf if plan.images is None else -(-plan.images // plan.segment)
        self.mix_every = max(1, n_steps // 200) if n_steps < math.inf else 1000
        self.curve_every = -(-n_steps // max(1, USUAL_PROBES if plan.probes is None else plan.probes))
        self.seconds_probing = self.seconds_of_probe = 0.0
        self.n_undone = self.n_undone_in_a_row = self.n_collapsed = 0
        self.is_over = False  # a rank has no more segments, or must stop before the next one
        self.saved = (directory.checkpoints.numbers() or [0])[-1]  # the last step that every rank has saved
        self.reported = -math.inf  # when the account of frames was
        self.window = Window(directory, learner, stream)

    def run(self) -> float:
        plan, stream = self.plan, self.stream
        self.seconds = self.directory.restore(self.learner, stream)
        self.saved = self.learner.n_steps
        self.n_reported = stream.account.rejected.total()
        self.notifier = Notifier()
        with ExitStack() as stack:
            self.metrics = None if plan.metrics is None else stack.enter_context(closing(Metrics(plan.metrics)))
            if self.metrics:
                say(f"metrics: http://127.0.0.1:{self.metrics.port}/metrics")
            self.candidates = open_candidates(self.directory.path, plan, stream.epoch, stream.has_thumbnails)
            if self.candidates:
                stack.enter_context(closing(self.candidates))
                self._save_first_model()
            if self.answers:
                stack.enter_context(closing(self.answers))
                self.answers.start()
            journal = Journal(self.directory.path / "journal.jsonl", limit=self.directory.log_bytes, lasting="accuracy")
            self.journal = stack.enter_context(closing(journal))
            minutes, steps, is_first = plan.checkpoint_minutes, plan.checkpoint_steps, self.ranks.index == 0
            self.checkpoints = Pace(self.directory.checkpoints, minutes, steps, quiet=not is_first)
            every = 10 if plan.images else 600  # seconds; a run without an end must not fill its log
            progress = Progress("learning", plan.images, every, quiet=not is_first)
            bar = stack.enter_context(progress)
            bar.start_from(stream.position)
            if self.served is not None:
                self.served.look()
                labels = labels_at_hand(plan, self.directory.path, stream)
                challenger = Challenger(labels, self.served, self.directory.model_with, self._tell)
                self.challenger = stack.enter_context(closing(challenger))
            self.notifier.ready()
            with closing(self._segments()) as segments:
                for images in segments:
                    self._offer(images)  # first, because a step takes time: a person may be waiting to label
                    step = self._step(images)
                    bar.advance(len(images), str(step or "undone"))
                    is_due, is_gone = self.ranks.largest(self.checkpoints.due(), self.directory.is_gone)
                    self._end_if(is_gone)
                    if self.asked.by_any(self.ranks):
                        break
                    if is_due:
                        self._save()
                    self._challenge()
                    self._rest(step)
            self._report_stream(now=True)
            self._report_early_end()
            saved = self._save()
            self._last_challenge()
            self._show(now=True)
        if self.asked.by_any(self.ranks):
            self.notifier.stopping()
            with suppress(OSError, UserError):  # for the dashboard of the stopped run
                self.directory.save_buffer(self.learner, self.stream)
            again = f"streamclr run with the same options and --out {self.directory.path} goes on"
            if self.ranks.index == 0 and self.learner.n_steps and (then := next_step(self.directory)):
                say(f"next: {then}")
            message = f"stopped after step {self.learner.n_steps}: {again if saved else 'not saved'}"
            raise self.asked.stopped(self.ranks, message)
        return self.seconds

    def _end_if(self, is_gone: float) -> None:
        """End the run if somebody has removed its directory: what it learns could not be kept."""
        if is_gone and self.ranks.index:
            raise QuietExit(2)
        if is_gone:
            after = f"the run ends after step {self.learner.n_steps}, what its last checkpoint has not is lost"
            raise UserError(f"{self.directory.path} was removed or moved: {after}")

    def _segments(self) -> Generator[Any]:
        """The segments of the stream while every rank has a whole one. Without other ranks the last may be smaller."""
        size = self.plan.segment
        how: dict[str, Any] = {"until": self.plan.images, "idle": self._wait, "arrived": self.window.saw}
        how["thumbnail_every"] = self.candidates.thumbnail_every if self.candidates else 0
        with closing(self.stream.segments(size, **how)) as segments:
            for images in segments:
                if not self._meet(HERE if len(images) == size or self.ranks.n == 1 else ENDED):
                    self.stream.account.pass_over(len(images), "no segment on another rank")
                    return
                yield images
        if not self.is_over:
            self._meet(ENDED)

    def _meet(self, state: int) -> bool:
        """Wait until every rank has a segment; a rank without one only reports its state. False if the run is over."""
        while True:
            worst, number = self.ranks.largest(state, self.asked.signal)
            if worst == ENDED or (worst == AWAITED and number):
                self.is_over, self.asked.signal = True, int(number)
                return False
            if worst == HERE or state != HERE:
                return True
            self._idle()

    def _wait(self) -> bool:
        """Called while there is no segment; True ends the run."""
        self._idle()
        # Another rank may already hold a segment of a recording, which must not be lost.
        return not self._meet(COMING if self.ranks.n > 1 and self.stream.exact else AWAITED)

    def _step(self, images: Any) -> Step | None:
        """One step and its line in the journal; None if it was undone."""
        try:
            step = self.learner.learn_many(images, self._tracks(len(images)))
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
        at_end = self.plan.images is not None and stream.position >= self.plan.images
        if stream.train and stream.test and self._may_probe(step, at_end):
            started = time.perf_counter()
            line["accuracy"] = curve_point(self.learner.model, stream.train, stream.test)
            self.seconds_of_probe = time.perf_counter() - started
            self.seconds_probing += self.seconds_of_probe
        if isinstance(self.learner.policy, Guarded):
            line["kept_out"] = dict(self.learner.policy.kept_out)
        if self.served is not None:
            line["served"] = self.served.current.number if self.served.current else None
        self.journal.write(line)
        self._watch(step)
        return step

    def _may_probe(self, step: Step, at_end: bool) -> bool:
        """Whether it is time for a point of the learning curve, and the usual ones do not take too long."""
        is_due = step.number % self.curve_every == 0 or at_end
        if self.plan.probes is not None:
            return self.plan.probes > 0 and is_due
        forward = step.seconds_training / (2 * self.plan.batch) / 3  # of one image: a third of a view's update
        cost = self.seconds_of_probe or (MAX_PROBE_LABELS + MAX_PROBE_TESTED) * forward
        return is_due and self.seconds_probing + cost <= PROBING * self.seconds

    def _tracks(self, n: int) -> Tensor | None:
        """The tracks of the next images, where the learner wants neighbouring frames and the stream knows them."""
        if self.learner.positives == "views":
            return None
        n_seen = self.learner.buffer.n_seen
        return self.stream.tracks(torch.arange(n_seen, n_seen + n))

    def _save_first_model(self) -> None:
        if not self.learner.n_steps:
            try:
                self.directory.save_first_model(self.learner.model)
            except UserError as error:  # a full disk
                self._tell(f"no questions before the first checkpoint: {error}")

    def _offer(self, images: Any) -> None:
        """Offer the next images as candidates for labelling."""
        if self.candidates:
            first = self.learner.buffer.n_seen
            tracks = self.stream.tracks(torch.arange(first, first + len(images)))
            if tracks is not None and self.stream.live:  # scenes by pixels: only those that are apart are known
                tracks = UNKNOWN - 1 - (first + tracks)  # each segment has numbers of its own
            try:
                self.candidates.offer(images, first, tracks, self.stream.thumbnail)
            except OSError as error:
                self._tell(f"the label queue cannot be written ({error.strerror})")
                self.candidates = None
            else:
                if not first:
                    say(f"questions are there while it learns: {next_step(self.directory)}")

    def _undone(self, why: str, n_images: int) -> None:
        self.n_undone += 1
        self.n_undone_in_a_row += 1
        self.stream.account.pass_over(n_images, "undone")
        self._tell(f"step undone: {why}")
        if not self.learner.is_finite():
            raise Damaged(why)
        with self.ranks.together():
            if self.n_undone_in_a_row == MAX_IN_A_ROW:
                raise UserError(f"{why}; {MAX_IN_A_ROW} steps in a row were undone: the run stops")

    def _watch(self, step: Step) -> None:
        """Report the step, and a collapse of the encoder."""
        self.n_collapsed = self.n_collapsed + 1 if step.spread < COLLAPSED_SPREAD else 0
        if self.n_collapsed == N_COLLAPSED:
            self._tell(f"collapse: all projections are alike (spread {step.spread:.1g})")
        self._report_stream()
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
            answers=self.answers.state() if self.answers else None,
        )

    def _about_served(self) -> dict[str, Any] | None:
        return self.served.current.about() if self.served is not None and self.served.current else None

    def _report_stream(self, now: bool = False) -> None:
        """Report lost connections at once and rejected frames once a minute."""
        for told in self.stream.take_told():
            self.directory.say(told)
        for source, event in self.stream.take_events():
            self._tell(f"{source}: {event}")
        account = self.stream.account
        if account.rejected.total() > self.n_reported and (now or time.monotonic() - self.reported > REPORT_SECONDS):
            self.n_reported, self.reported = account.rejected.total(), time.monotonic()
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
            if self.answers:
                self.metrics.update(**of_answers(self.answers.state()))
            if self.challenger:
                heads = {"taken": self.challenger.n_taken, "refused": self.challenger.n_refused}
                self.metrics.update(**of_served(self._about_served()), challengers_total=heads)

    def _report_early_end(self) -> None:
        """Of a recording, whose length nobody knew."""
        images, n_read = self.plan.images, self.stream.position
        if images is None or not 0 < n_read < images or self.asked.signal or self.ranks.n > 1 or not self.stream.live:
            return
        kind, _, options = split_source(self.plan.source)
        passes = -(-images * int(options.get("passes", 1)) // n_read)
        more = f": write passes={passes} in the source for more" if kind == "video" else ""
        self._tell(f"the source has ended after {n_read:,} of the {images:,} images asked for{more}")

    def _idle(self) -> None:
        """What still has to be done while nothing is learned."""
        if self.ranks.n == 1:  # else all of them look after each step
            self._end_if(self.directory.is_gone)
        self.notifier.alive()
        self._report_stream()
        self._challenge()
        self._show()

    def _rest(self, step: Step | None) -> None:
        """Pause, so that learning takes only its share of the time (--duty)."""
        if step is None or self.plan.duty_share == 1:
            return
        spent = step.seconds_scoring + step.seconds_training
        until = time.monotonic() + spent * (1 / self.plan.duty_share - 1)
        while not self.asked.by_any(self.ranks):
            (left,) = self.ranks.largest(until - time.monotonic())
            if left <= 0:
                break
            self._idle()
            time.sleep(min(1.0, left))

    def _save(self) -> bool:
        """Save a checkpoint; False if a disk is full. All its numbers are finite.

        If one rank cannot save, all drop this checkpoint: it would take the place of one that every rank has.
        """
        if self.learner.n_steps == self.saved:
            return True  # nothing was learned since; a checkpoint is never overwritten
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
        """Save the state of this rank."""
        try:
            state = {
                "learner": self.learner.state_dict(copy=False),
                "stream": self.stream.state_dict(),
                "seconds": self.seconds,
                "ranks": self.ranks.n,
            }
            self.journal.sync()
        except OSError as error:
            return self.checkpoints.failed(self.learner.n_steps, error)
        return self.checkpoints.save(self.learner.n_steps, state)

    def _challenge(self) -> None:
        """Give the challenger a copy of the encoder, if it wants one."""
        if self.challenger and not self.challenger.is_busy and self.challenger.wants and self.learner.is_finite():
            weights = self.learner.model.state_dict()
            self.challenger.give(self.learner.n_steps, {name: tensor.clone() for name, tensor in weights.items()})

    def _last_challenge(self) -> None:
        """Train a last head on the final encoder with all labels, unless the run was asked to stop."""
        if self.challenger and not self.asked.signal:
            self.challenger.due()
            while (self.challenger.is_busy or self.challenger.wants) and not self.asked.signal:
                self._idle()
                time.sleep(0.05)

    def _tell(self, event: str) -> None:
        if not self.directory.is_gone:  # else that is what there is to say
            self.directory.tell(event, step=self.learner.n_steps)
