"""A run directory: configuration, journal, weights and results, and the loop around the learner."""

import dataclasses
import fcntl
import inspect
import itertools
import json
import math
import os
import shutil
import sys
import typing
from contextlib import closing, suppress
from dataclasses import MISSING, asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from streamclr import options as opts
from streamclr.checkpoint import (
    Checkpoints,
    json_line,
    load_encoder,
    load_tensors,
    load_weights,
    save_tensors,
    write_json,
)
from streamclr.classifier import Classifier, draw_labelled, evaluate, evaluate_supervised
from streamclr.encoder import ENCODERS, ContrastiveModel, ResNet, seeded
from streamclr.errors import UserError
from streamclr.guard import GUARDS, Guarded
from streamclr.learner import Learner, Step, find_device
from streamclr.loop import learn
from streamclr.policy import POLICIES, Policy
from streamclr.progress import say
from streamclr.stream import AnyStream, absolute_source, open_stream, split_source, takes


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class RunConfig:
    """Learn from a stream, then train and test a classifier on few labels."""

    source: str = option("synthetic:", "where the images come from, as in cifar10?stc=500 or folder:DIR")
    policy: str = option("contrast", f"which images stay in the buffer: {', '.join(POLICIES)}")
    images: int | None = option(None, "how many images of the stream to learn from [of a camera, until it is stopped]")
    epochs: float | None = option(None, "the same in passes over the dataset [1, where there is one]")
    stc: int | None = option(None, "consecutive images of one class [the source's own]")
    size: int | None = option(None, "side of the images in pixels [the source's own]")
    buffer: int = option(256, "images in the buffer")
    batch: int | None = option(None, "images in one update, drawn from the buffer [all of it]")
    segment: int | None = option(None, "new images in one step [as many as the buffer holds]")
    rescore_every: int | None = option(None, "lazy scoring: score an image in the buffer again every T steps [1]")
    guards: str = option(
        "auto",
        f"against frames that lie: on, off, or some of {', '.join(GUARDS)} with commas [on where the source is live]",
    )
    updates: int = option(1, "updates of the model in one step")
    encoder: str = option("resnet18", f"the base encoder: {', '.join(ENCODERS)}")
    width: int = option(64, "channels of the encoder's first stage")
    stem: str | None = option(
        None, "small (3x3), half (the same, stride 2) or imagenet (7x7 and max-pool) [small below 64 px]"
    )
    norm: str = option("batch", "batch or group")
    init: str | None = option(None, "start from these encoder weights (.safetensors, torchvision's names)")
    lr: float = option(1e-4, "learning rate of Adam")
    weight_decay: float = option(1e-4, "weight decay of Adam")
    temperature: float = option(0.5, "of the contrastive loss")
    memory: str | None = option(
        None, "what the process may take while learning, as in 600M or 1.5G [as much as it takes]"
    )
    compile: bool = option(False, "compile the model: pays on long runs of narrow encoders, needs a C++ compiler")
    fractions: str = option("0.01,0.1,1", "label fractions for the classifier")
    probes: int = option(10, "points of the learning curve: kNN accuracy on up to 5,000 labels while learning")
    supervised: bool = option(False, "also train the supervised baselines on the same labels")
    checkpoint_minutes: float = option(
        10, "minutes between two checkpoints, more if they are large; 0: only at the end and when stopped"
    )
    checkpoint_steps: int | None = option(None, "a checkpoint every so many steps too")
    resume: bool = option(
        False, "go on with the newest unfinished run of these options [without: only if --out is one]"
    )
    duty: str = option("100%", "share of the time in which to learn, as in 50%; capture goes on meanwhile")
    seed: int = option(0, "of the stream, the weights, the views and the draws")
    device: str | None = option(None, "cpu or cuda [a GPU if there is one]")
    out: str | None = option(None, "the run directory, new or with this run unfinished in it [runs/SOURCE-POLICY]")
    metrics: int | None = option(
        None, "serve Prometheus metrics on this port of 127.0.0.1; 0 takes a free one and says which"
    )

    @property
    def label_fractions(self) -> tuple[float, ...]:
        return tuple(opts.convert(part.strip(), float, "a label fraction") for part in self.fractions.split(","))

    @property
    def duty_share(self) -> float:
        share = opts.convert(self.duty.strip().removesuffix("%"), float, "--duty")
        share /= 100 if self.duty.strip().endswith("%") else 1
        if not 0 < share <= 1:
            raise UserError(f"duty is {self.duty}: use more than 0% and up to 100%")
        return share


def run(config: RunConfig) -> tuple[Path, dict[str, Any]]:
    """Learn and evaluate: the whole job of one run. Returns its directory and its results."""
    config, stream, learner = prepare(config)
    with closing(RunDirectory.of(config)) as directory:
        try:
            seconds = learn(config, learner, stream, directory)
        except UserError:
            directory.remove_if_empty()
            raise
        directory.save_model(learner.model)
        directory.save_buffer(learner, stream)
        results = {
            "images": learner.buffer.n_seen,
            "steps": learner.n_steps,
            "seconds_learning": seconds,
            "account": stream.account.state_dict(),
            **evaluate_run(config, learner.model, stream, directory),
        }
        directory.save_results(results)
    return directory.path, results


def prepare(config: RunConfig) -> tuple[RunConfig, AnyStream, Learner]:
    """All that a run needs, checked before anything is written: what is wrong is said now, not hours later."""
    stream = open_run_stream(config)
    config = resolved(config, stream)
    _ = config.duty_share
    labelled = stream.source.train
    for fraction in config.label_fractions:
        if labelled is not None:
            draw_labelled(labelled.labels, fraction, labelled.classes)
    learner = make_learner(config)
    if config.memory is not None:
        assert config.segment is not None
        assert config.size is not None
        print(f"memory: {learner.fit((config.segment, 3, config.size, config.size))}", file=sys.stderr)
    return config, stream, learner


def open_run_stream(config: RunConfig) -> AnyStream:
    given = "seed" in split_source(config.source)[2]
    seed = {"seed": config.seed} if takes(config.source, "seed") and not given else {}
    return open_stream(config.source, stc=config.stc, size=config.size, **seed)


def resolved(config: RunConfig, stream: AnyStream) -> RunConfig:
    """The configuration with every default filled in, checked against the stream before anything is made."""
    epoch, end = stream.source.epoch, stream.source.n_images
    if config.images is not None and config.epochs is not None:
        raise UserError("both --images and --epochs are given: use one of them")
    epochs = 1 if config.epochs is None else config.epochs
    if not 0 < epochs < math.inf:
        raise UserError(f"epochs is {epochs}: use a number above 0")
    images = config.images
    if images is None:
        if config.epochs is not None and epoch is None:
            raise UserError(f"{config.source} has no epochs: say how long with --images")
        images = round(epochs * epoch) if epoch else None if stream.live else 20_000
    if end is not None and images is not None and images > end:
        how = f": write passes={-(-images // epoch)} in the source for more" if epoch else ""
        raise UserError(f"{config.source} ends after {end} images, before the {images} asked for{how}")
    batch = config.buffer if config.batch is None else config.batch
    if images is not None and images < batch:
        whole = f"{config.source} ends after {images} images" if images == end else f"{images} images are asked for"
        raise UserError(f"{whole}, before one batch of {batch}: give it more, or use a smaller --buffer or --batch")
    if not 0 <= config.probes <= 1000:
        raise UserError(f"probes is {config.probes}: use 0 (no learning curve) to 1000")
    segment = config.segment if config.segment is not None else config.buffer
    if segment < 1:
        raise UserError(f"segment is {segment}: use at least 1")
    size = stream.size
    stem = ("small" if size < 64 else "imagenet") if config.stem is None else config.stem
    return dataclasses.replace(
        config,
        source=absolute_source(config.source),
        images=images,
        epochs=None,
        batch=batch,
        segment=segment,
        size=size,
        stem=stem,
        guards="on" if config.guards == "auto" and stream.live else config.guards,
    )


def make_encoder(config: RunConfig) -> ResNet:
    if config.encoder not in ENCODERS:
        raise UserError(f"no encoder {config.encoder!r}: {opts.one_of(config.encoder, ENCODERS)}")
    return ENCODERS[config.encoder](config.width, config.stem, config.norm)


def policy_options(policy: str) -> list[str]:
    """The names of the options that a policy takes."""
    name, _ = opts.split(policy)
    if name not in POLICIES:
        raise UserError(f"no policy {name!r}: {opts.one_of(name, POLICIES)}")
    return list(inspect.signature(POLICIES[name]).parameters)


def make_policy(config: RunConfig) -> Policy:
    """The policy `name?key=value`, with the run's seed, temperature and re-scoring period where it takes them."""
    name, options = opts.split(config.policy)
    takes = policy_options(config.policy)
    if config.rescore_every is not None:
        if "rescore_every" not in takes:
            raise UserError(f"--rescore-every is for the policy contrast: {name} does not score lazily")
        options["rescore_every"] = str(config.rescore_every)
    defaults = {"seed": config.seed, "temperature": config.temperature}
    chosen = {k: v for k, v in defaults.items() if k in takes} | options
    policy: Policy = opts.build(POLICIES[name], chosen, f"the policy {name}")
    return policy if config.guards in ("auto", "off") else Guarded(policy, config.guards)


def make_learner(config: RunConfig) -> Learner:
    with seeded(config.seed):
        encoder = make_encoder(config)
    if config.init is not None:
        load_encoder(encoder, Path(config.init))
    return Learner(
        encoder,
        make_policy(config),
        buffer_size=config.buffer,
        batch_size=config.batch,
        updates_per_segment=config.updates,
        temperature=config.temperature,
        lr=config.lr,
        weight_decay=config.weight_decay,
        memory=config.memory,
        compile=config.compile,
        seed=config.seed,
        device=config.device,
    )


def evaluate_run(
    config: RunConfig, model: ContrastiveModel, stream: AnyStream, directory: "RunDirectory"
) -> dict[str, Any]:
    """Stage two on the run's own labels; nothing for a stream that has none."""
    train, test = stream.source.train, stream.source.test
    if train is None or test is None:
        return {"labels": {}}
    results, heads = evaluate(model, train, test, config.label_fractions, config.seed)
    directory.save_classifiers(heads, train.classes)
    if config.supervised:
        results["supervised"] = evaluate_supervised(
            lambda: make_encoder(config), train, test, config.label_fractions, config.seed, model.mean.device
        )
    return results


class RunDirectory:
    """config.json, journal.jsonl, model.safetensors, classifier.safetensors, buffer.safetensors, results.json."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def of(cls, config: RunConfig) -> "RunDirectory":
        """The directory in which the same run was left unfinished, or a new one; for this process alone."""
        default = Path("runs") / f"{split_source(config.source)[0]}-{opts.split(config.policy)[0]}"
        places = [Path(config.out)] if config.out else _newest_first(default) if config.resume else []
        for directory in (cls(place) for place in places if (place / "config.json").is_file()):
            different = directory.differences(config)
            if config.out and different:
                raise UserError(f"{directory.path} has a run with other options ({different[0]}): give another --out")
            if config.out and directory.results is not None:
                raise UserError(f"{directory.path} exists already, and its run is finished: give another --out")
            if not different and directory.results is None:
                directory.lock()
                return directory
        if config.resume and not config.out:
            raise UserError(f"no unfinished run of these options at {default}: start it without --resume")
        directory = cls(new_directory(config.out, default))
        content = asdict(config) | {"out": None, "resume": False, "source": opts.redacted(config.source)}
        write_json(directory.path / "config.json", content)
        directory.lock()
        return directory

    def differences(self, config: RunConfig) -> list[str]:
        """The options that another run has otherwise than this one."""
        ours, theirs = asdict(self.config), asdict(config) | {"source": opts.redacted(config.source)}
        names = [name for name in ours if name not in NOT_THE_RUNS and ours[name] != theirs[name]]
        return [f"{name} is {ours[name]} there, {theirs[name]} here" for name in names]

    def lock(self) -> None:
        """For this process, until it closes the directory or ends."""
        self._lock = (self.path / "config.json").open("rb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is learning in {self.path}: wait for it, or give another --out") from None

    def close(self) -> None:
        self._lock.close()

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints")

    def restore(self, learner: Learner, stream: AnyStream) -> float:
        """Bring learner, stream and journal to the last checkpoint that is whole. Returns the seconds of learning."""
        found, journal = self.checkpoints.latest(), self.path / "journal.jsonl"
        if found is None:
            self.checkpoints.drop_after(0)
            if journal.exists() and journal.stat().st_size:
                say(f"no whole checkpoint in {self.path}: the run begins anew")
                os.truncate(journal, 0)
            return 0.0
        number, state = found
        self.checkpoints.drop_after(number)
        if journal.exists() and journal.stat().st_size >= state["journal_bytes"]:
            os.truncate(journal, state["journal_bytes"])
        else:  # somebody cut or removed it: what was learned does not depend on it
            say(f"streamclr: {journal} is shorter than when step {number} was saved: it goes on with what is there")
        learner.load_state_dict(state["learner"])
        stream.load_state_dict(state["stream"])
        say(f"going on after step {number}, image {stream.position:,}")
        return state["seconds"]

    def remove_if_empty(self) -> None:
        """Take back a run that failed before its first step; what tells or holds something stays."""
        if not (self.steps() or self.checkpoints.numbers() or (self.path / "events.jsonl").exists()):
            for name in ("config.json", "journal.jsonl"):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
            self.path.rmdir()

    @classmethod
    def existing(cls, path: str | Path) -> "RunDirectory":
        if not (Path(path) / "config.json").is_file():
            raise UserError(f"{path} is no run directory: it has no config.json")
        return cls(Path(path))

    @property
    def config(self) -> RunConfig:
        file, hints = self.path / "config.json", typing.get_type_hints(RunConfig)
        content = read_json(file)
        if not isinstance(content, dict):
            raise UserError(f"{file} holds no configuration")
        if unknown := sorted(content.keys() - hints.keys()):
            raise UserError(f"{file} has keys that are not known: {', '.join(unknown)}")
        for name, value in content.items():
            if not isinstance(value, hints[name]) and not (isinstance(value, int) and hints[name] is float):
                raise UserError(f"{file} has {value!r} for {name}")
        return RunConfig(**content)

    @property
    def results(self) -> dict[str, Any] | None:
        return read_json(self.path / "results.json") if (self.path / "results.json").exists() else None

    def tell(self, event: str, step: int) -> None:
        """A line in events.jsonl and on stderr: what somebody who looks after the run should know."""
        say(f"streamclr: {event}")
        with (
            suppress(OSError),
            (self.path / "events.jsonl").open("a", encoding="utf-8") as file,
        ):  # the disk may be full
            file.write(json_line({"time": datetime.now().astimezone().isoformat(), "step": step, "event": event}))

    def steps(self) -> list[dict[str, Any]]:
        """The journal so far; a last line that is still being written is left out."""
        journal, steps = self.path / "journal.jsonl", []
        lines = journal.read_text("utf-8", errors="replace").splitlines(keepends=True) if journal.exists() else []
        for number, line in enumerate(lines, 1):
            if line.endswith("\n"):
                try:
                    steps.append(json.loads(line))
                    _ = [steps[-1][field.name] for field in dataclasses.fields(Step) if field.default is MISSING]
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{journal}, line {number} is damaged ({error!r})") from None
        return steps

    def save_model(self, model: ContrastiveModel) -> None:
        save_tensors(self.path / "model.safetensors", model.state_dict())

    def load_model(self) -> ContrastiveModel:
        config = self.config
        model = ContrastiveModel(make_encoder(config))
        file = self.path / "model.safetensors"
        load_weights(model, load_tensors(file), str(file))
        return model.to(find_device(config.device))

    def save_classifiers(self, heads: dict[float, Classifier], classes: tuple[str, ...]) -> None:
        tensors = {f"{fraction}/{k}": t for fraction, head in heads.items() for k, t in head.state_dict().items()}
        save_tensors(self.path / "classifier.safetensors", tensors)
        write_json(self.path / "classes.json", classes)

    def load_classifier(self, fraction: float | None = None) -> tuple[Classifier, list[str]]:
        """The classifier of one label fraction, the largest unless told, and its class names."""
        file = self.path / "classifier.safetensors"
        if not file.exists():
            raise UserError(f"{self.path} has no classifier: its run is not finished, or its stream has no labels")
        tensors = load_tensors(file)
        fractions = sorted({float(key.split("/")[0]) for key in tensors})
        fraction = fractions[-1] if fraction is None else fraction
        if fraction not in fractions:
            raise UserError(
                f"{file} has no classifier for the fraction {fraction}: use {', '.join(map(str, fractions))}"
            )
        own = {key.split("/")[1]: t for key, t in tensors.items() if float(key.split("/")[0]) == fraction}
        n_classes, n_features = own["linear.weight"].shape
        head = Classifier(n_features, n_classes)
        load_weights(head, own, str(file))
        classes = read_json(self.path / "classes.json")
        if not isinstance(classes, list) or len(classes) != n_classes:
            raise UserError(f"{self.path / 'classes.json'} does not name the {n_classes} classes of {file}")
        return head.eval().requires_grad_(False), classes

    def save_buffer(self, learner: Learner, stream: AnyStream) -> None:
        tensors = {k: v for k, v in learner.buffer.state_dict().items() if isinstance(v, torch.Tensor)}
        if stream.source.classes:
            tensors["labels"] = stream.labels(learner.buffer.arrivals.cpu())
        save_tensors(self.path / "buffer.safetensors", tensors)

    def load_buffer(self) -> dict[str, torch.Tensor]:
        return load_tensors(self.path / "buffer.safetensors")

    def save_results(self, results: dict[str, Any]) -> None:
        write_json(self.path / "results.json", results)


# Options that change where and how a run is kept, not what it learns.
NOT_THE_RUNS = ("out", "resume", "checkpoint_minutes", "checkpoint_steps", "metrics", "duty")


def _newest_first(default: Path) -> list[Path]:
    """runs/NAME and runs/NAME-2, … as `new_directory` makes them."""
    found = [path for path in default.parent.glob(f"{default.name}*") if path.is_dir()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def new_directory(asked: str | Path | None, default: Path) -> Path:
    """The directory asked for, which must be new or empty, or the default with the first free number."""
    path = default if asked is None else Path(asked)
    try:
        if asked is not None:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise UserError(f"{path} exists already: give another --out, nothing is overwritten")
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


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
