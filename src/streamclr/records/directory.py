"""A run directory: configuration, journal, events, checkpoints, weights, labels and results."""

import dataclasses
import fcntl
import itertools
import json
import math
import os
import shutil
import threading
from contextlib import closing, suppress
from dataclasses import MISSING, asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from streamclr.base import options as opts
from streamclr.base.errors import UserError
from streamclr.base.files import held, near, read_json, remove_left, write_json
from streamclr.base.plugins import plugins_of
from streamclr.base.progress import say
from streamclr.base.tensors import load_tensors, load_weights, save_tensors
from streamclr.compute.device import find_device
from streamclr.compute.ranks import OneProcess
from streamclr.encoders.inference import infer
from streamclr.encoders.projection import ContrastiveModel
from streamclr.guards import Guarded
from streamclr.learner import Learner
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.journal import Journal, cut, files_of, last_number, lines_of, parse_limit
from streamclr.records.plan import RunPlan
from streamclr.step import Step
from streamclr.streams.spec import split_source
from streamclr.streams.stream import Stream

FINISHED = "the finished encoder"
AT_FIRST = "the encoder of step 0"
PLUGINS = "plugins.json"
FIRST = "first.safetensors"  # the model of step 0, so that questions can be chosen before the first checkpoint


class RunDirectory:
    """All files of a run: docs/runs.md lists them.

    log_bytes: limit of each of its journals, for the process that writes them.
    """

    def __init__(self, path: Path, log_bytes: int | None = None):
        self.path, self.log_bytes = path, log_bytes
        self._telling = threading.Lock()

    @classmethod
    def of(cls, plan: RunPlan) -> "RunDirectory":
        """The directory in which the same run was left unfinished, or a new one; for this process alone."""
        for directory in cls._places(plan):
            if plan.out:
                directory._check_same(plan)
            elif directory.differences(plan) or directory.results is not None:
                continue
            directory.lock()
            directory._note_plugins(plan)
            return directory
        if plan.resume and not plan.out:
            raise _nothing_to_resume(plan)
        directory = cls(new_directory(plan.out, _default_place(plan)), parse_limit(plan.log_disk))
        content = asdict(plan) | {"out": None, "resume": False, "source": opts.redacted(plan.source)}
        del content["to"]  # it has passwords
        write_json(directory.path / "config.json", content)
        directory.lock()
        directory._note_plugins(plan)
        return directory

    @classmethod
    def check_out(cls, plan: RunPlan) -> None:
        """An error now, before anything is measured, if no run can be kept in --out or go on with --resume."""
        if plan.out is None:
            if plan.resume and cls.begun(plan) is None:
                raise _nothing_to_resume(plan)
            return
        directory = cls(Path(plan.out))
        if not (directory.path / "config.json").is_file():
            _check_free(directory.path)
            return
        directory._check_same(dataclasses.replace(plan, segment=directory.config.segment))  # which may still be chosen

    def _check_same(self, plan: RunPlan) -> None:
        """An error unless this is the run of the plan, unfinished."""
        if different := self.differences(plan):
            raise UserError(f"{self.path} has a run with other options ({different[0]}): give another --out")
        if self.results is not None:
            raise UserError(f"{self.path} exists already, and its run is finished: give another --out")

    @classmethod
    def begun(cls, plan: RunPlan) -> RunPlan | None:
        """The plan of the unfinished run that this one would go on with, whatever it says: the newest of its source."""
        source = opts.redacted(plan.source)
        unfinished = (one.config for one in cls._places(plan) if one.results is None)
        return next((own for own in unfinished if own.source == source), None)

    @classmethod
    def _places(cls, plan: RunPlan) -> list["RunDirectory"]:
        """Where the same run may have been left unfinished."""
        places = [Path(plan.out)] if plan.out else _newest_first(_default_place(plan)) if plan.resume else []
        limit = parse_limit(plan.log_disk)
        return [cls(place, limit) for place in places if (place / "config.json").is_file()]

    def differences(self, plan: RunPlan) -> list[str]:
        """The options that another run has otherwise than this one."""
        ours, theirs = asdict(self.config), asdict(plan) | {"source": opts.redacted(plan.source)}
        names = [name for name in ours if name not in NOT_THE_RUNS and ours[name] != theirs[name]]
        return [f"{name} is {ours[name]} there, {theirs[name]} here" for name in names]

    def _note_plugins(self, plan: RunPlan) -> None:
        """Keep the hash of the source of each part that is not streamclr's; say if one is another than before."""
        hashes = {plugin.name: plugin.hash for plugin in plugins_of(asdict(plan))}
        known = read_json(file) if (file := self.path / PLUGINS).is_file() else {}
        changed = [f"{name} was {known[name]}, is {new}" for name, new in hashes.items() if known.get(name, new) != new]
        if changed:
            how = "its steps from here on are by the new source"
            self.tell(f"the source of a part of this run has changed ({', '.join(changed)}): {how}", self._last_step)
        if hashes != known:
            write_json(file, hashes)

    @property
    def _last_step(self) -> int:
        return max(self.checkpoints.numbers(), default=0)

    def lock(self) -> None:
        """For this process, until it closes the directory or ends."""
        told = f"another process is learning in {self.path}: wait for it, or give another --out"
        self._lock = held(self.path / "config.json", told, seconds=1.0)  # `is_learning` takes it for a moment
        remove_left(self.path)

    def close(self) -> None:
        self._lock.close()

    @property
    def is_gone(self) -> bool:
        """Whether somebody has removed or moved the directory that this process has locked, or put another there."""
        locked = os.fstat(self._lock.fileno())
        try:
            found = (self.path / "config.json").stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a disk that fails for a while
            return False
        return (found.st_dev, found.st_ino) != (locked.st_dev, locked.st_ino)

    @property
    def is_learning(self) -> bool:
        """Whether a process is at work in it."""
        with (self.path / "config.json").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints")

    def latest(self, ranks: OneProcess) -> tuple[int, dict[str, Any]] | None:
        """The newest checkpoint of which every rank has its own, whole."""
        most = math.inf
        while True:
            with ranks.together():
                found = self.checkpoints.latest(most)
                n_ranks = found[1].get("ranks", 1) if found else ranks.n
                if n_ranks != ranks.n:
                    how = "without torchrun" if n_ranks == 1 else f"with torchrun and {n_ranks} ranks in all"
                    raise UserError(f"the run in {self.path} has {n_ranks} ranks, this job {ranks.n}: start it {how}")
            number = found[0] if found else 0
            newest, oldest, n_saved = ranks.largest(number, -number, len(self.checkpoints.numbers()))
            if newest == -oldest:
                break
            most = -oldest
        with ranks.together():
            if found is None and ranks.n > 1 and n_saved > 1:  # after the first save all have one, or it is lost
                raise UserError(f"a rank has no checkpoint below {self.path}: bring it back, or give another --out")
        return found

    def restore(self, learner: Learner, stream: Stream) -> float:
        """Bring learner, stream and journal to the last checkpoint that is whole. Returns the seconds of learning."""
        found, journal = self.latest(learner.ranks), self.path / "journal.jsonl"
        self.checkpoints.drop_after(found[0] if found else 0)
        if found is None:
            (self.path / "candidates.bin").unlink(missing_ok=True)
            if last_number(journal):
                self.say(f"no whole checkpoint in {self.path}: the run begins anew")
            cut(journal, 0)
            return 0.0
        number, state = found
        cut(journal, number + 1)
        if last_number(journal) < number:  # somebody removed it, or the disk was full: learning does not depend on it
            self.say(f"streamclr: {journal} has no line of step {number}: it goes on with what is there")
        learner.load_state_dict(state["learner"])
        stream.load_state_dict(state["stream"])
        self.say(f"going on after step {number}, image {stream.position:,}")
        return state["seconds"]

    def remove_if_empty(self) -> None:
        """Take back a run that failed before its first step; what tells or holds something stays."""
        if self.is_gone:  # and what is there now is not ours
            return
        has_steps = last_number(self.path / "journal.jsonl") or self.checkpoints.numbers()
        if not (has_steps or any(self.path.rglob("events.jsonl"))):
            learned = ("config.json", "journal.jsonl", "candidates.bin", FIRST)
            watched = ("looked-at", "status.json", "newest.safetensors", "buffer.safetensors")  # if somebody looked
            predicted = files_of(self.path / "predictions.jsonl")
            for file in (*predicted, *(self.path / name for name in (*learned, *watched, PLUGINS))):
                file.unlink(missing_ok=True)
            for name in ("checkpoints", "ranks", "answers"):
                shutil.rmtree(self.path / name, ignore_errors=True)
            with suppress(OSError):  # somebody has put something there, or looks at it this moment
                self.path.rmdir()

    @classmethod
    def existing(cls, path: str | Path) -> "RunDirectory":
        if not (Path(path) / "config.json").is_file():
            raise UserError(f"{path} is no run directory: {_why_no_run(Path(path))}")
        return cls(Path(path))

    @property
    def config(self) -> RunPlan:
        file = self.path / "config.json"
        content = read_json(file)
        if not isinstance(content, dict):
            raise UserError(f"{file} holds no configuration")
        return RunPlan.of(content, str(file))

    @property
    def results(self) -> dict[str, Any] | None:
        return read_json(self.path / "results.json") if (self.path / "results.json").exists() else None

    def say(self, text: str) -> None:
        """A line on stderr."""
        say(text)

    def tell(self, event: str, step: int) -> None:
        """A line in events.jsonl and on stderr: what somebody who looks after the run should know."""
        self.say(f"streamclr: {event}")
        line = {"time": datetime.now().astimezone().isoformat(), "step": step, "event": event}
        path = self.path / "events.jsonl"
        with self._telling, suppress(OSError), closing(Journal(path, None, self.log_bytes)) as events:  # a full disk
            events.write({"number": last_number(path) + 1} | line)

    def steps(self) -> list[dict[str, Any]]:
        """The journal so far; a last line that is still being written is left out."""
        journal, steps = self.path / "journal.jsonl", []
        for number, line in enumerate(lines_of(journal), 1):
            try:
                steps.append(json.loads(line))
                _ = [steps[-1][field.name] for field in dataclasses.fields(Step) if field.default is MISSING]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{journal}, line {number} is damaged ({error!r})") from None
        return steps

    def save_first_model(self, model: ContrastiveModel) -> None:
        """Before the first step of a run that asks a person: nobody has to wait for the first checkpoint."""
        save_tensors(self.path / FIRST, model.state_dict())

    def save_model(self, model: ContrastiveModel) -> None:
        save_tensors(self.path / "model.safetensors", model.state_dict())

    def load_model(self) -> ContrastiveModel:
        file = self.path / "model.safetensors"
        return self.model_with(load_tensors(file), str(file))

    def newest_model(self) -> tuple[ContrastiveModel, str]:
        """The model of a finished run, of the last checkpoint or of step 0, and the name of its encoder's state."""
        if self.newest_encoder() == AT_FIRST:
            return self.model_with(load_tensors(self.path / FIRST), FIRST), AT_FIRST
        learner, name = self.newest_learner()
        return self.load_model() if learner is None else self.model_with(learner["model"], name), name

    def newest_encoder(self) -> str | None:
        """The name of the state that `newest_model` would give; None if there is none yet."""
        if self.results is not None:
            return FINISHED
        if numbers := self.checkpoints.numbers():
            return f"the encoder of step {numbers[-1]}"
        return AT_FIRST if (self.path / FIRST).exists() else None

    def newest_learner(self) -> tuple[dict[str, Any] | None, str]:
        """That of the last checkpoint, none of a finished run, and the name of its encoder's state."""
        if self.results is not None:
            return None, FINISHED
        found = self.checkpoints.latest()
        if found is None:
            if not self.is_learning:
                how = "its run ended before the first checkpoint: start it again with the same options"
                raise UserError(f"{self.path} has no encoder yet, {how}")
            minutes = self.config.checkpoint_minutes
            when = f"after {minutes:g} minutes" if minutes else "at its end"
            told = f"its first checkpoint comes {when} (--checkpoint-minutes): try again then"
            raise UserError(f"{self.path} has no encoder yet, {told}")
        return found[1]["learner"], f"the encoder of step {found[0]}"

    @property
    def image_size(self) -> int:
        """Side of the images that the encoder learns from."""
        return self.config.size

    def model_with(self, weights: dict[str, torch.Tensor], where: str) -> ContrastiveModel:
        """The run's model with these weights, which came from there."""
        plan = self.config
        with torch.device("meta"):  # no initial weights: these would be drawn from the generator of a step under way
            model = plan.architecture.make_model()
        load_weights(model, weights, where, assign=True)
        return model.to(find_device(plan.device))

    def save_buffer(self, learner: Learner, stream: Stream) -> None:
        """The buffer with its features, and what the last step did not keep, with the guards that hid it."""
        left = learner.buffer.left()
        tensors = {k: v for k, v in learner.buffer.state_dict(copy=False).items() if isinstance(v, torch.Tensor)}
        tensors |= {f"left_{name}": column for name, column in left.items()}
        if len(tensors["images"]):
            tensors["features"] = infer(learner.model, tensors["images"], learner.model.features)
        if stream.classes:
            tensors["labels"] = stream.labels(learner.buffer.arrivals.cpu())
        hidden = learner.policy.hidden if isinstance(learner.policy, Guarded) else {}
        about = {"step": learner.n_steps, "guards": {n: hidden[n] for n in left["arrivals"].tolist() if n in hidden}}
        save_tensors(self.path / "buffer.safetensors", tensors, about=json.dumps(about))

    def load_buffer(self) -> dict[str, torch.Tensor]:
        return load_tensors(self.path / "buffer.safetensors")

    def save_results(self, results: dict[str, Any]) -> None:
        write_json(self.path / "results.json", results)
        (self.path / FIRST).unlink(missing_ok=True)


class RankDirectory(RunDirectory):
    """What a rank but the first keeps of the run, below the directory of the first or, on another machine, in one of
    the same name: journal, events, and checkpoints of the same steps. The first rank's lock is for all of them."""

    def __init__(self, run: Path, index: int, log_bytes: int | None = None):
        super().__init__(run / "ranks" / str(index), log_bytes)
        self.index = index
        self.path.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        super().say(f"rank {self.index}: {text}")

    def remove_if_empty(self) -> None:
        """Of a rank that the run does not have; the first removes the others with its own."""
        with suppress(OSError):
            self.path.rmdir()

    @property
    def is_gone(self) -> bool:
        """The first rank says it for all."""
        return False

    def close(self) -> None:
        pass


def open_directory(plan: RunPlan, ranks: OneProcess) -> RunDirectory:
    """The run directory, or what this rank has below it."""
    with ranks.together():
        first = RunDirectory.of(plan) if ranks.index == 0 else None
    path = ranks.collect(first and os.path.abspath(first.path))[0]
    return RankDirectory(Path(path), ranks.index, parse_limit(plan.log_disk)) if first is None else first


def _why_no_run(path: Path) -> str:
    """And what to give instead."""
    if path.is_file():
        return "it is a file; `streamclr run SOURCE --out DIR` makes a run directory"
    if not path.exists():
        return near(path) or "there is nothing of that name; `streamclr run SOURCE --out DIR` makes one"
    inside = [place for place in sorted(path.iterdir()) if (place / "config.json").is_file()] if path.is_dir() else []
    if inside:
        return f"but it has some in it, give one: {', '.join(map(str, inside[:5]))}{' …' * (len(inside) > 5)}"
    return "it has no config.json"


# Options that change where and how a run is kept, not what it learns.
NOT_THE_RUNS = (
    *"out resume checkpoint_minutes checkpoint_steps log_disk metrics duty decoders serve host port predict".split(),
    *"to threshold smooth every_frame snapshot".split(),
)


def _default_place(plan: RunPlan) -> Path:
    policy = opts.split(plan.policy)[0].rpartition(":")[2]  # of one's own: the class alone
    return Path("runs") / f"{split_source(plan.source)[0]}-{policy}"


def _nothing_to_resume(plan: RunPlan) -> UserError:
    return UserError(f"no unfinished run of these options at {_default_place(plan)}: start it without --resume")


def _newest_first(default: Path) -> list[Path]:
    """runs/NAME and runs/NAME-2, … as `new_directory` makes them."""
    found = [path for path in default.parent.glob(f"{default.name}*") if path.is_dir()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _check_free(path: Path) -> None:
    """What a process leaves that was killed as it wrote its first file does not count."""
    others = (p for p in path.iterdir() if not p.name.startswith(".config.json.")) if path.is_dir() else ()
    if path.exists() and (not path.is_dir() or any(others)):
        raise UserError(f"{path} exists already: give another --out, nothing is overwritten")


def new_directory(asked: str | Path | None, default: Path) -> Path:
    """The directory asked for, which must be new or empty, or the default with the first free number."""
    path = default if asked is None else Path(asked)
    try:
        if asked is not None:
            _check_free(path)
            path.mkdir(parents=True, exist_ok=True)
            return path
        default.parent.mkdir(parents=True, exist_ok=True)
        for n in itertools.count(2):
            with suppress(FileExistsError):  # taken, perhaps by a run that starts at this moment
                path.mkdir()
                break
            path = default.with_name(f"{default.name}-{n}")
        return path
    except OSError as error:
        raise UserError(f"cannot make the directory {path} ({error.strerror}): give another --out") from None
