"""The commands `label page`, `export`, `import` and `train`."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from streamclr.base.errors import UserError
from streamclr.base.options import argument, one_of, option
from streamclr.base.table import percent
from streamclr.labelling.exchange import export_labels, import_labels
from streamclr.labelling.session import LabelSession, Training
from streamclr.records.directory import FINISHED, RunDirectory
from streamclr.records.label_budget import N_ASKED
from streamclr.runs.assemble import public_model
from streamclr.stage_two import KINDS
from streamclr.web.server import PageOptions, ServeOptions, serve

CHOICES = ("auto", *KINDS)


@dataclass(frozen=True)
class LabelPageOptions(PageOptions):
    run: str = argument("the run directory")


@dataclass(frozen=True)
class LabelTrainOptions:
    run: str = argument("the run directory")
    classifier: str = option(
        "auto",
        "linear (a layer on the frozen encoder), finetuned (the encoder is trained too), selftrained (so again, with "
        "what it is sure of in frames without a label), or auto (the best on labels held back)",
    )
    spread: str | None = option(
        None, "let a label count for the neighbouring frames of its scene too: on or off [as the run]"
    )


@dataclass(frozen=True)
class LabelFileOptions:
    run: str = argument("the run directory")
    file: str = argument("a .json file, as Label Studio reads and writes it, or a .csv file")


def page_command(config: LabelPageOptions) -> None:
    directory = RunDirectory.existing(config.run)
    if directory.config.label_budget is None:
        raise UserError(f"{directory.path} has no label queue: run with --label-budget {N_ASKED}")
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(PageOptions)}
    serve(ServeOptions(**own, runs=(config.run,)), page="/label/{run}")


def export_command(config: LabelFileOptions) -> None:
    with _questions_of(config.run) as session:
        session.train()  # the file has the classifier's guesses
        print(f"{export_labels(session, Path(config.file))} questions, answered or not, in {config.file}")


def import_command(config: LabelFileOptions) -> None:
    with _questions_of(config.run) as session:
        print(f"{import_labels(session, Path(config.file))} new answers from {config.file}")
        _tell(session.train(), session, config.run)


def train_command(config: LabelTrainOptions) -> None:
    if config.classifier not in CHOICES:
        raise UserError(f"no classifier {config.classifier!r}: {one_of(config.classifier, CHOICES)}")
    if config.spread not in (None, "on", "off"):
        raise UserError(f"spread is {config.spread!r}: use on or off")
    plan = RunDirectory.existing(config.run).config
    with _questions_of(config.run) as session:
        public = None if config.classifier == "linear" else public_model(plan)
        spread = None if config.spread is None else config.spread == "on"
        _tell(session.train(config.classifier, public, spread), session, config.run)


@contextmanager
def _questions_of(run: str) -> Iterator[LabelSession]:
    with closing(LabelSession(RunDirectory.existing(run))) as session:
        session.prepare(choose_anew=session.is_short)
        yield session


def _tell(trained: Training | None, session: LabelSession, run: str) -> None:
    if trained is None:
        print(f"no classifier yet: the labels are of fewer than two classes; next: streamclr label {run}")
        return
    accuracy = "" if trained.accuracy is None else f", {percent(trained.accuracy)} right on labels held back"
    if told := session.message or trained.why:
        print(told)
    encoder = "" if session.model_of == FINISHED else f" ({session.model_of}: train again after it has learned more)"
    spread = f", spread to {trained.n_spread} neighbouring frames" if trained.n_spread else ""
    print(f"classifier from {trained.n_labels} labels{spread}{accuracy}: streamclr predict {run} --source …{encoder}")
