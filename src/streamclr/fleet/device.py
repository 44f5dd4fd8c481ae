"""A device of a fleet: it has a stream, buffer, optimizer and run directory of its own; all share the encoder."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.tensors import load_weights
from streamclr.classifier import Head
from streamclr.encoders.inference import infer
from streamclr.encoders.projection import ContrastiveModel
from streamclr.fleet.average import Update, Weights, exchanged, is_statistic
from streamclr.labelling.candidates import pixels
from streamclr.labelling.store import Labels
from streamclr.models.heads import GLOBAL
from streamclr.models.pretrained import Pretrained, save_pretrained
from streamclr.records.directory import RunDirectory
from streamclr.records.journal import lines_of
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream, resolve
from streamclr.runs.assemble import make_learner
from streamclr.runs.loop import learn_stream
from streamclr.streams.stream import Stream

MAX_LABELS_SENT = 1000  # by one device


class LabelledImages(NamedTuple):
    """Images that somebody has labelled; they stay on the device."""

    images: Tensor
    names: list[str]


class Device:
    """One round after the other in a run directory, which `streamclr label`, `serve` and `report` take like any other.

    options: `out` is the directory, of this run or new.
    stream: instead of that of the source.
    statistics: of BatchNorm, shared with the fleet or local.
    labelled: instead of what a person answered in the directory.
    """

    def __init__(
        self,
        options: RunOptions,
        stream: Stream | None = None,
        statistics: str = "shared",
        labelled: Callable[[], LabelledImages] | None = None,
    ):
        self.stream = open_run_stream(options) if stream is None else stream
        # The server says how long to learn, round by round; a dataset without an end may be smaller than a batch.
        epoch, end = self.stream.epoch, self.stream.n_images
        asked = 2**62 if epoch is not None and end is None else None
        asked_of_it = replace(options, images=asked, init="random")  # the server sends the weights
        self.plan = replace(resolve(asked_of_it, self.stream), images=None, probes=0)
        self.directory = RunDirectory.of(self.plan)
        self.statistics = statistics
        self.labelled = self._answered if labelled is None else labelled

    def close(self) -> None:
        self.directory.close()

    def learn(self, weights: Weights, n_images: int, name: str) -> Update:
        """Go on from the fleet's encoder with the next images; buffer and optimizer are this device's own."""
        learner = make_learner(self.plan)
        load_weights(learner.model, {**learner.model.state_dict(), **weights}, "what the server sent")
        number = position = n_before = 0
        if found := self.directory.checkpoints.latest():
            # The loop begins with the last checkpoint: the weights go there, beside the buffer and the moments.
            number, state = found
            keeps_own = self.statistics == "local"
            state["learner"]["model"] |= {k: t for k, t in weights.items() if not (keeps_own and is_statistic(k))}
            position = state["stream"]["position"]
            n_before = state["learner"]["buffer"]["n_seen"]
            self.directory.checkpoints.save(number, state)
        learn_stream(replace(self.plan, images=position + n_images), learner, self.stream, self.directory)
        losses = [json.loads(line)["loss"] for line in lines_of(self.directory.path / "journal.jsonl", after=number)]
        if not losses:
            raise UserError(f"{self.plan.source} has ended: nothing was learned in this round")
        loss = sum(losses) / len(losses)
        return Update(name, exchanged(learner.model, self.statistics), learner.buffer.n_seen - n_before, loss)

    def features(self, weights: Weights) -> tuple[Tensor, list[str]]:
        """Features of the labelled images by the fleet's encoder, and class names: nothing else of them is sent."""
        images, names = self.labelled()
        model = self.model_with(weights)
        if not names:
            return torch.empty(0, model.n_features), []
        return infer(model, images[-MAX_LABELS_SENT:], model.features).cpu(), names[-MAX_LABELS_SENT:]

    def model_with(self, weights: Weights) -> ContrastiveModel:
        """The fleet's encoder, with this device's BatchNorm statistics if they are local."""
        model = self.plan.architecture.make_model()
        own = model.state_dict()
        if self.statistics == "local" and (found := self.directory.checkpoints.latest()):
            own |= {name: t for name, t in found[1]["learner"]["model"].items() if is_statistic(name)}
        load_weights(model, {**own, **weights}, "what the server sent")
        return model

    def take_head(self, weights: Weights, head: Weights, classes: list[str]) -> None:
        """Write the fleet's encoder and classifier into the device's directory."""
        if self.statistics == "local" and not self.directory.checkpoints.numbers():
            raise UserError("this device has not learned yet: it has no BatchNorm statistics for the fleet's encoder")
        save_global(self.directory.path / GLOBAL, self.model_with(weights), head, classes, self.plan.size)

    def _answered(self) -> LabelledImages:
        """What a person answered on the labelling page of this device."""
        file = self.directory.path / "labels.sqlite"
        if not file.exists():
            return LabelledImages(torch.empty(0), [])
        with closing(Labels(file)) as labels:
            names = labels.classes()
            given = {key: answer.class_id for key, answer in labels.answers().items() if answer.class_id is not None}
            pictures = {key: picture for key in given if (picture := labels.picture(key)) is not None}
        images = [pixels(picture) for picture in pictures.values()] or [torch.empty(0)]
        return LabelledImages(torch.stack(images), [names[given[key]] for key in pictures])


def save_global(path: Path, model: ContrastiveModel, head: Weights, classes: list[str], size: int) -> None:
    """A model and its classifier as a directory for `streamclr predict` and `from_pretrained`, in place of the last."""
    new, old = (path.with_name(f".{path.name}-{which}") for which in ("new", "old"))
    for left in (new, old):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    save_pretrained(Pretrained(model, Head.from_state(head, "the fleet's classifier"), classes, size), new)
    with suppress(FileNotFoundError):
        os.rename(path, old)
    os.rename(new, path)
    shutil.rmtree(old, ignore_errors=True)
