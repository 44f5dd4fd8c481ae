"""What each command does, but for those that need no torch: construct, loop, print."""

import dataclasses
import json
import sys
import textwrap
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamclr.base import options
from streamclr.base.errors import UserError
from streamclr.base.options import option
from streamclr.base.table import Table, labels_heading, percent
from streamclr.experiments import ReproduceOptions, reproduce
from streamclr.labelling.exchange import export_labels, import_labels
from streamclr.labelling.session import Asking
from streamclr.models.export import ExportOptions, export
from streamclr.models.versions import Versions
from streamclr.records.directory import FINISHED, RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream
from streamclr.runs.doctor.diagnose import DoctorOptions, diagnose, suggest
from streamclr.runs.evaluation import evaluate_run
from streamclr.runs.report import results_table, write_report
from streamclr.runs.run import run
from streamclr.sweeps.compare import CompareOptions, compare, demo
from streamclr.web.server import PageOptions, ServeOptions, serve


@dataclass(frozen=True)
class EvalOptions:
    """Train and test the classifier of a finished run again, with other label fractions."""

    run: str = option("", "the run directory")
    fractions: str | None = option(None, "label fractions, with commas between [the run's own]")
    supervised: bool = option(False, "also train the supervised baselines on the same labels")


@dataclass(frozen=True)
class RollbackOptions:
    """Return to the version before the one that `run --predict` serves, while it runs or not."""

    run: str = option("", "the run directory")


@dataclass(frozen=True)
class ReportOptions:
    """Write one HTML page about one run or several."""

    runs: tuple[str, ...] = option((), "run directories")
    out: str | None = option(None, "the page [report.html in the run, or here for several]")


@dataclass(frozen=True)
class DemoOptions:
    """Learn from the built-in stream, train a classifier on 1 % of the labels, compare: three to four minutes."""

    out: str | None = option(None, "the directory, which must be new [runs/demo]")


@dataclass(frozen=True)
class LabelOptions(PageOptions):
    """Ask a person about a run on a page; or `label export RUN FILE`, `label import RUN FILE`, `label train RUN`."""

    words: tuple[str, ...] = option((), "RUN, or an action, the run and, but for train, a .json or .csv file")


def run_command(config: RunOptions) -> None:
    path, results = run(config)
    directory = RunDirectory(path)
    write_report([path], path / "report.html", title=f"{config.source}, {config.policy}")
    if results["labels"]:
        results_table([(path.name, directory)]).print()
        _print_supervised(results)
    else:
        print("the stream has no labelled test images, so there is no classifier yet")
    if directory.config.label_budget is not None:
        print(f"label: streamclr label {path}")
    print(f"report: {path / 'report.html'}")


def eval_command(config: EvalOptions) -> None:
    directory = RunDirectory.existing(config.run)
    own = directory.config
    own = dataclasses.replace(own, fractions=config.fractions or own.fractions, supervised=config.supervised)
    before = {key: value for key, value in (directory.results or {}).items() if key != "supervised"}
    model = directory.load_model()
    results = evaluate_run(own, model, open_run_stream(own), directory)
    if not results["labels"]:
        raise UserError(f"{own.source} has no labels: there is nothing to evaluate")
    directory.save_results(before | results)
    write_report([directory.path], directory.path / "report.html", title=f"{own.source}, {own.policy}")
    results_table([(directory.path.name, directory)]).print()
    _print_supervised(results)


def _print_supervised(results: dict[str, Any]) -> None:
    if supervised := results.get("supervised"):
        names = {"end_to_end": "end to end", "untrained_encoder": "head on an untrained encoder"}
        rows = [[name, *(percent(supervised[f][key]) for f in supervised)] for key, name in names.items()]
        Table("Supervised baselines", ["", *(labels_heading(f) for f in supervised)], rows).print()


def rollback_command(config: RollbackOptions) -> None:
    now, was = Versions(RunDirectory.existing(config.run)).rollback()
    print(f"{now} is served again, version {was.number} no more")


def export_command(config: ExportOptions) -> int:
    directory = RunDirectory.existing(config.run)
    out = None if config.out is None else Path(config.out)
    file, parity = export(directory, config.format, config.int8, out, config.fraction, config.pure)
    parity.table(file.name).print()
    print(f"classifier: {file}")
    if parity.problem:
        print(f"streamclr: {file} does not match PyTorch: {parity.problem}", file=sys.stderr)
        return 1
    return 0


def report_command(config: ReportOptions) -> None:
    paths = [RunDirectory.existing(path).path for path in config.runs]
    out = Path(config.out) if config.out else (paths[0] if len(paths) == 1 else Path()) / "report.html"
    print(f"report: {write_report(paths, out, title=', '.join(path.name for path in paths))}")


def compare_command(config: CompareOptions) -> None:
    _show(*compare(config))


def demo_command(config: DemoOptions) -> None:
    _show(*demo(config.out))


def _show(out: Path, table: Table) -> None:
    table.print()
    print(f"report: {out / 'report.html'}")


def reproduce_command(config: ReproduceOptions) -> None:
    print(f"results: {reproduce(config)}")


def serve_command(config: ServeOptions) -> None:
    serve(config)


def label_command(config: LabelOptions) -> None:
    action, *rest = config.words if len(config.words) > 1 else ("page", *config.words)
    if action == "page":
        directory = RunDirectory.existing(rest[0])
        if directory.config.label_budget is None:
            raise UserError(f"{directory.path} has no label queue: run with --label-budget 1%")
        serve(ServeOptions(config.port, config.host, config.allow_host, runs=(rest[0],)), page="/label/{run}")
        return
    n_words = {"export": 2, "import": 2, "train": 1}
    if action not in n_words:
        raise UserError(f"streamclr label cannot {action!r}: {options.one_of(action, n_words)}, or give a run alone")
    if len(rest) != n_words[action]:
        raise UserError(f"streamclr label {action} takes {'a run and a file' if n_words[action] == 2 else 'a run'}")
    with closing(Asking(RunDirectory.existing(rest[0]))) as asking:
        asking.prepare(choose_anew=False)
        if action == "import":
            print(f"{import_labels(asking, Path(rest[1]))} new answers from {rest[1]}")
        trained = asking.train()
        if action == "export":
            print(f"{export_labels(asking, Path(rest[1]))} questions, answered or not, in {rest[1]}")
        elif trained is None:
            print("labels of fewer than two classes: no classifier yet")
        else:
            known = "" if trained.accuracy is None else f", {percent(trained.accuracy)} right on labels held back"
            until = "" if asking.model_of == FINISHED else f" ({asking.model_of}: train again when it has learned on)"
            print(f"classifier from {trained.n_labels} labels{known}: streamclr predict {rest[0]} --source …{until}")


def doctor_command(config: DoctorOptions) -> int:
    plan, diagnosis = diagnose(config)
    if not config.json:
        for name, text in diagnosis.rows():
            _print_row(name, text)
    suggestions = []
    for suggestion in () if diagnosis.keeps_up else suggest(plan, diagnosis.step, diagnosis.fps):
        suggestions.append(suggestion)
        if not config.json:
            _print_row(f"change {len(suggestions)}", str(suggestion))
    if config.json:
        found = [dataclasses.asdict(suggestion) for suggestion in suggestions]
        print(json.dumps(diagnosis.as_dict() | {"suggestions": found}, indent=1))
    return 0 if diagnosis.is_well else 1


def _print_row(name: str, text: str) -> None:
    lines = textwrap.wrap(text, 68, break_on_hyphens=False)
    print(f"{name:<12}" + ("\n" + " " * 12).join(lines), flush=True)
