"""The heads of a run directory: which there are, what is known of each, which one is used; saving and loading them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.files import read_json, write_json
from streamclr.base.progress import say
from streamclr.base.tensors import load_metadata, load_tensors, save_tensors, tensor_names
from streamclr.classifier import Classifier, Head
from streamclr.encoders.projection import ContrastiveModel
from streamclr.models.card import FINE_TUNED
from streamclr.models.pretrained import is_pretrained, read_config
from streamclr.models.versions import Versions
from streamclr.records.directory import FINISHED, RunDirectory

MODEL = "model/"  # in a file of heads: before the names of the encoder's tensors, if a head has an encoder of its own
PUBLIC = "the public encoder"  # the state of an encoder that has learned nothing from the stream
GLOBAL = "global"  # in the directory of a fleet's device: the fleet's classifier, as a pretrained directory


class HeadInfo(NamedTuple):
    """What is known of a head."""

    name: str
    chosen_by: str  # what `streamclr predict` is given to use it
    file: Path
    classes: list[str]
    n_labels: int | None  # None: not known
    accuracy: float | None  # 0 to 1; None: not measured
    measured: str | None  # how the accuracy was measured
    encoder: str  # the state of the encoder that the head was trained on
    fraction: float | None = None  # of the source's own labels
    kind: str = "linear"  # finetuned: its encoder was trained with it
    below: str = ""  # how the names of its tensors begin in the file
    n_spread: int = 0  # labels of neighbouring frames beside those given
    has_encoder: bool = False  # of its own, so that it does not matter what the run has learned since

    @property
    def state(self) -> str:
        """That of the encoder which the head is used with."""
        return self.encoder + FINE_TUNED if self.kind == "finetuned" else self.encoder


class Heads:
    """Four kinds: from a person's answers, by label fraction, the versions that `run --predict` serves, the fleet's."""

    def __init__(self, directory: RunDirectory):
        self.directory, self.path = directory, directory.path
        self.labelled_file = self.path / "labelled.safetensors"
        self.encoder_file = self.path / "labelled-encoder.safetensors"  # that this head is for, while the run learns on
        self.fractions_file = self.path / "classifier.safetensors"

    # ------------------------------------------------------------------------------------------------------------
    # Which there are.

    def all(self) -> list[HeadInfo]:
        """The default first, if there is one."""
        labelled = self.labelled()
        own = [labelled] if labelled else []
        return [*own, *reversed(self.by_fraction().values()), *self._versions(), *self._global()]

    def default(self) -> tuple[HeadInfo, str]:
        """The head that is used unless another is asked for, and why."""
        if (labelled := self.labelled()) is not None:
            return labelled, "a person's answers come first"
        if heads := list(self.by_fraction().values()):
            return heads[-1], "the largest label fraction comes first"
        raise self._none()

    @property
    def _only_served(self) -> bool:
        """Whether no other kind of head is there: `predict` works while a run with --predict learns."""
        return self.labelled() is None and not self.by_fraction()

    def find(self, fraction: float | None = None) -> HeadInfo:
        """The head of a label fraction; the default unless told."""
        if fraction is None:
            return self.default()[0]
        heads = self.by_fraction()
        if not heads:
            raise self._none()
        if fraction not in heads:
            known = ", ".join(map(str, heads))
            raise UserError(f"{self.fractions_file} has no classifier for the fraction {fraction}: use {known}")
        return heads[fraction]

    def _none(self) -> UserError:
        others = "".join(f"use {head.chosen_by} for {head.name}" for head in self.all()[:1])
        if self.directory.config.label_budget is not None:
            why = f"label some images, which takes about 2 minutes: streamclr label {self.path}"
        elif self.directory.results is None:
            why = "its run is not finished"
        else:
            why = "its stream has no labels, and it kept no images to ask about (--label-budget off)"
        return UserError(f"{self.path} has no classifier yet: {others or why}")

    def labelled(self) -> HeadInfo | None:
        """The head from a person's answers."""
        if not self.labelled_file.exists():
            return None
        about = json.loads(load_metadata(self.labelled_file)["about"])
        labels, n_tested = f"{about['n_labels']} labels that a person gave", about.get("n_tested")
        return HeadInfo(
            name=f"the head from {labels}",
            chosen_by=str(self.path),
            file=self.labelled_file,
            classes=about["classes"],
            n_labels=about["n_labels"],
            accuracy=about.get("accuracy"),
            measured=f"{n_tested} held back of {labels}" if n_tested else f"cross-validation of {labels}",
            encoder=about["encoder"],
            kind=about.get("classifier", "linear"),
            n_spread=about.get("n_spread", 0),
            has_encoder=any(name.startswith(MODEL) for name in tensor_names(self.labelled_file)),
        )

    def by_fraction(self) -> dict[float, HeadInfo]:
        """The heads by label fraction, the smallest first."""
        if not self.fractions_file.exists():
            return {}
        names = tensor_names(self.fractions_file)
        fractions = sorted((float(text), f"{text}/") for text in {name.split("/")[0] for name in names})
        results, classes = self.directory.results or {}, self.class_names()
        entries = {float(key): entry for key, entry in results.get("labels", {}).items()}
        heads = {}
        for fraction, below in fractions:
            entry = entries.get(fraction, {})
            tested = f"{results['n_test']} test images, classifier from {entry['n_labels']} labels" if entry else None
            heads[fraction] = HeadInfo(
                name=f"the head of the label fraction {fraction}",
                chosen_by=f"--fraction {fraction}",
                file=self.fractions_file,
                classes=classes,
                n_labels=entry.get("n_labels"),
                accuracy=entry.get("accuracy"),
                measured=tested,
                encoder=PUBLIC if entry.get("public_encoder") else FINISHED,
                fraction=fraction,
                kind=entry.get("classifier", "linear"),
                below=below,
                has_encoder=any(name.startswith(below + MODEL) for name in names),
            )
        return heads

    def _versions(self) -> list[HeadInfo]:
        """The one first that `run --predict` serves; only that one can be chosen, and `rollback` drops it."""
        heads = []
        for file, state in Versions(self.directory).facts():
            right, n, _ = state["score"]
            heads.append(
                HeadInfo(
                    name=f"version {int(file.name)}",
                    chosen_by="--served",
                    file=file,
                    classes=state["classes"],
                    n_labels=len(state["trained_on"]),
                    accuracy=right / n if n else None,
                    measured=f"{n} labels held back" if n else None,
                    encoder=f"the encoder of step {state['step']}",
                )
            )
        return heads

    def _global(self) -> list[HeadInfo]:
        path = self.path / GLOBAL
        if not is_pretrained(path):
            return []
        config = read_config(path / "config.json")
        return [
            HeadInfo(
                name="the fleet's head",
                chosen_by=str(path),
                file=path,
                classes=list(config["id2label"].values()),
                n_labels=None,
                accuracy=config["card"]["accuracy"],
                measured=config["card"]["measured"],
                encoder=config["card"]["state"] or "the fleet's encoder",
            )
        ]

    def class_names(self) -> list[str]:
        """The class names of the source, once its labels were used; none for a camera."""
        file = self.path / "classes.json"
        return read_json(file) if file.exists() else []

    # ------------------------------------------------------------------------------------------------------------
    # Loading.

    def load(self, fraction: float | None = None, served: bool = False) -> Classifier:
        """The classifier of a label fraction, else the version that is served, else the default."""
        if served:
            return self.served()[1]
        if fraction is None and self._only_served and (version := Versions(self.directory).look()) is not None:
            return version.classifier
        info = self.find(fraction)
        newest = self.directory.newest_encoder()
        if info.file == self.labelled_file and not info.has_encoder and info.encoder != newest:
            newer = f"streamclr label train {self.path} makes a newer one"
            say(f"streamclr: this classifier is for {info.encoder}, and the run has learned on to {newest}: {newer}")
        return self.classifier(info)

    def served(self) -> tuple[HeadInfo, Classifier]:
        """The version that is served, with its own encoder."""
        versions = Versions(self.directory)
        version = versions.look()
        if version is None:
            raise versions.none()
        return next(head for head in self._versions() if int(head.file.name) == version.number), version.classifier

    def classifier(self, info: HeadInfo, newest: tuple[ContrastiveModel, str] | None = None) -> Classifier:
        """The whole classifier of a person's answers or of a label fraction, with the head's own encoder if it has one.

        newest: the run's model and the name of its encoder's state, if they have been loaded.
        """
        state = load_tensors(info.file, info.below)
        own = {name.removeprefix(MODEL): t for name, t in state.items() if name.startswith(MODEL)}
        head = Head.from_state({name: t for name, t in state.items() if not name.startswith(MODEL)}, str(info.file))
        n_classes = head.linear.out_features
        if not isinstance(info.classes, list) or len(info.classes) != n_classes:
            raise UserError(f"{self.path / 'classes.json'} does not name the {n_classes} classes of {info.file}")
        if own:
            model = self.directory.model_with(own, str(info.file))
        elif info.file == self.labelled_file and info.encoder == self._kept_encoder():
            model = self.directory.model_with(load_tensors(self.encoder_file), str(self.encoder_file))
        else:
            model, encoder = newest or self.directory.newest_model()
            if info.file == self.labelled_file and info.encoder != encoder:
                why, again = self.default()[1], f"streamclr label train {self.path}"
                raise UserError(f"{info.file} is for {info.encoder}, not for {encoder}, and {why}: {again}")
        return Classifier(model, head, info.classes, self.directory.image_size)

    # ------------------------------------------------------------------------------------------------------------
    # Saving.

    def save_fractions(
        self,
        heads: Mapping[float, Head],
        classes: Sequence[str],
        models: Mapping[float, ContrastiveModel | None] | None = None,
    ) -> None:
        """The heads from a source's own labels, by label fraction, in place of the last ones.

        models: of the heads that have an encoder of their own.
        """
        tensors: dict[str, Tensor] = {}
        for fraction, head in heads.items():
            tensors |= {f"{fraction}/{name}": t for name, t in _tensors_of(head, (models or {}).get(fraction)).items()}
        save_tensors(self.fractions_file, tensors)
        write_json(self.path / "classes.json", classes)

    def save_labelled(
        self,
        head: Head,
        classes: list[str],
        encoder: str,
        n_labels: int,
        accuracy: float | None,
        n_tested: int | None = None,
        kind: str = "linear",
        model: ContrastiveModel | None = None,
        n_spread: int = 0,
    ) -> None:
        """The head from a person's answers.

        encoder: the state of the encoder that it was trained on.
        n_tested: labels that were held back for the accuracy; None: all, a part at a time.
        model: with an encoder of its own.
        n_spread: neighbouring frames that the labels were spread to.
        """
        about = {"classes": classes, "encoder": encoder, "n_labels": n_labels, "accuracy": accuracy}
        about |= {"n_tested": n_tested, "classifier": kind, "n_spread": n_spread}
        save_tensors(self.labelled_file, _tensors_of(head, model), about=json.dumps(about))

    def forget_labelled(self) -> None:
        """Delete the head from a person's answers: they were taken back."""
        self.labelled_file.unlink(missing_ok=True)
        self.encoder_file.unlink(missing_ok=True)

    def keep_encoder(self, model: ContrastiveModel, encoder: str) -> None:
        """Keep the encoder that the next head is trained on beside it, so that it stays valid while the run learns on.

        The finished encoder is in the run anyway.
        """
        if encoder == FINISHED:
            self.encoder_file.unlink(missing_ok=True)
        elif encoder != self._kept_encoder():
            save_tensors(self.encoder_file, model.state_dict(), encoder=encoder)

    def _kept_encoder(self) -> str | None:
        """The state of the encoder that is kept."""
        return load_metadata(self.encoder_file).get("encoder") if self.encoder_file.exists() else None


def _tensors_of(head: Head, model: ContrastiveModel | None) -> dict[str, Tensor]:
    own = {} if model is None else {f"{MODEL}{name}": t for name, t in model.state_dict().items()}
    return {**head.state_dict(), **own}
