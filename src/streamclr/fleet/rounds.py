"""The server's side: rounds in a directory, which can be resumed, and one classifier from the labels of all devices."""

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.files import held, read_json, write_json
from streamclr.base.options import one_of
from streamclr.base.progress import say
from streamclr.base.tensors import load_weights, save_tensors
from streamclr.classifier import Head, train_head
from streamclr.encoders.projection import ContrastiveModel
from streamclr.fleet.average import STATISTICS, Average, Round, Update, Weights, exchanged
from streamclr.fleet.device import MAX_LABELS_SENT, save_global
from streamclr.fleet.options import check_built_in
from streamclr.models.heads import GLOBAL
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.journal import USUAL_LIMIT, Journal, cut, lines_of, parse_limit
from streamclr.records.options import RunOptions
from streamclr.runs.assemble import initial_model

LOCK_SECONDS = 10.0  # to wait for the directory: a stopped server process ends a little later than Flower
MAX_NAME_LENGTH = 200  # characters of a class name from a device


class FleetHead(NamedTuple):
    """The fleet's classifier."""

    weights: Weights
    classes: list[str]
    n_labels: int
    encoder: Weights  # whose features it was trained on; later rounds change the encoder

    def classifier(self) -> Head:
        return Head.from_state(self.weights, "the fleet's classifier")


class Rounds:
    """The global encoder, its journal and its checkpoints, in a directory.

    learner: options of the devices' learners, which also give the initial weights.
    options: `momentum`, `slow`, `statistics` and `round_images`; they cannot change within a directory.
    """

    def __init__(self, path: Path, learner: RunOptions, options: dict[str, Any]):
        if options["statistics"] not in STATISTICS:
            raise UserError(f"--statistics is {(own := options['statistics'])!r}: {one_of(own, STATISTICS)}")
        check_built_in(asdict(learner))
        if learner.size is None:
            raise UserError("size is missing: give the side of the images, which all devices have in common")
        self.path, self.learner, self.size, self.options = path, learner, learner.size, options
        self.model = initial_model(learner, self.size)
        self.start = exchanged(self.model)
        weights = exchanged(self.model, options["statistics"])
        self.average = Average(weights, options["momentum"], options["slow"], options["round_images"])
        self.head: FleetHead | None = None
        self.refused: Counter[str] = Counter()
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._open()

    def _open(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        file, journal = self.path / "fleet.json", self.path / "rounds.jsonl"
        own = json.loads(json.dumps({**asdict(self.learner), "out": None, **self.options}))
        if file.exists():
            there = read_json(file)
            for name, value in own.items():
                if there.get(name) != value:
                    how = f"{name} is {there.get(name)} there and {value} here"
                    raise UserError(f"{self.path} has a fleet with other options ({how}): give another --out")
        elif any(self.path.iterdir()):
            raise UserError(f"{self.path} is not empty and has no fleet in it: give another --out")
        else:
            write_json(file, own)
        busy = f"another fleet is running in {self.path}: wait for it, or give another --out"
        self._lock = held(file, busy, LOCK_SECONDS)
        if found := self.checkpoints.latest():
            state = found[1]
            self.average.load_state_dict(state["average"])
            self.refused = Counter(state["refused"])
            cut(journal, self.n_rounds + 1)  # drop a round that will be repeated
            if state["head"] is not None:
                self.head = FleetHead(**{"encoder": self.average.kept, **state["head"]})  # older checkpoints have none
            say(f"continuing after round {self.n_rounds}")
        self.journal = Journal(journal, "the journal of rounds", parse_limit(USUAL_LIMIT))

    def close(self) -> None:
        self.journal.close()
        self._lock.close()

    @property
    def n_rounds(self) -> int:
        return self.average.n_rounds

    @property
    def sent(self) -> Weights:
        """What a round begins with on a device; a device that keeps its own statistics begins with the first ones."""
        return self.start | self.average.weights

    def take(self, updates: Sequence[Update], n_asked: int, failed: dict[str, str], seconds: float) -> Round:
        """One round. It is on disk when this returns.

        failed: device and error, for those that answered with one; devices that did not answer are in neither.
        """
        done = self.average.take(updates, n_asked)
        for device, why in failed.items():
            say(f"streamclr: device {device} failed in round {done.number}: {why}")
        for device, why in done.refused.items():
            say(f"streamclr: update of device {device} rejected in round {done.number}: {why}")
        self.refused.update(done.refused.values())
        silent = n_asked - len(updates) - len(failed)
        line = asdict(done) | {"failed": failed, "silent": silent, "seconds": seconds, "time": round(time.time(), 3)}
        self.journal.write(line | {"refused_so_far": dict(self.refused)})
        self._save()
        say(summary(line))
        return done

    def take_labels(self, labelled: Sequence[tuple[str, Tensor, list[str]]]) -> FleetHead | None:
        """Train one classifier on the features and class names that devices sent; None with fewer than two classes.

        Labels that do not fit the encoder are rejected with a message.
        """
        features, names = [], []
        for device, own, classes in labelled:
            fits = own.shape == (len(classes), self.model.n_features) and own.dtype == torch.float32
            fits = fits and len(classes) <= MAX_LABELS_SENT and bool(own.isfinite().all())
            fits = fits and all(0 < len(name) <= MAX_NAME_LENGTH for name in classes)
            if not fits:
                say(f"streamclr: labels of device {device} rejected: not valid features with class names")
                self.refused["labels"] += 1
                continue
            features.append(own)
            names += classes
        classes = sorted(set(names))
        if len(classes) < 2:
            return None
        targets = torch.tensor([classes.index(name) for name in names])
        head = train_head(torch.cat(features), targets, len(classes), quiet=True)
        self.head = FleetHead(dict(head.state_dict()), classes, len(names), self.average.kept)
        self._save()
        if self.options["statistics"] == "shared":  # else only the devices have statistics
            save_global(self.path / GLOBAL, self.kept_model(), self.head.weights, classes, self.size)
        say(f"classifier from {len(names)} labels of {len(features)} devices, {len(classes)} classes")
        return self.head

    def _save(self) -> None:
        head = None if self.head is None else self.head._asdict()
        state: dict[str, Any] = {"average": self.average.state_dict(), "head": head, "refused": dict(self.refused)}
        try:
            self.journal.sync()
            self.checkpoints.save(self.n_rounds, state)
            save_tensors(self.path / "model.safetensors", self.kept_model().state_dict())
        except OSError as error:  # the earlier checkpoints are complete
            say(f"streamclr: no checkpoint of round {self.n_rounds} ({error.strerror or error}); continuing")

    def kept_model(self) -> ContrastiveModel:
        """The global encoder for use, with its projection head."""
        load_weights(self.model, {**self.model.state_dict(), **self.average.kept}, "the global encoder")
        return self.model


def summary(line: dict[str, Any]) -> str:
    """A line of the journal for people."""
    rejected = sorted(Counter(line["refused"].values()).items())
    counts = {f"rejected: {reason}": n for reason, n in rejected}
    counts |= {"failed": len(line["failed"]), "did not answer": line["silent"]}
    rest = "".join(f" | {n} {what}" for what, n in counts.items() if n)
    loss = "–" if line["loss"] is None or math.isnan(line["loss"]) else f"{line['loss']:.3f}"
    return f"round {line['number']} | {len(line['taken'])} of {line['n_asked']} devices | loss {loss}{rest}"


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The journal of a fleet, without a last line that is still being written."""
    return [json.loads(line) for line in lines_of(path / "rounds.jsonl")]
