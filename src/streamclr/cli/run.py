"""The commands `run`, `eval`, `report`, `compare`, `demo` and `doctor`."""

import dataclasses
import json
import textwrap
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamclr.base.errors import UserError
from streamclr.base.options import argument, option
from streamclr.base.table import Table, labels_heading, percent
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions, as_run
from streamclr.records.plan import open_run_stream, resolve
from streamclr.runs.choose import choose, command
from streamclr.runs.dashboard import Dashboard
from streamclr.runs.doctor.diagnose import DoctorOptions, diagnose, suggest
from streamclr.runs.evaluation import evaluate_run
from streamclr.runs.next_step import next_step
from streamclr.runs.report import is_report, results_table, write_report
from streamclr.runs.run import run
from streamclr.sweeps.compare import CompareOptions, compare, demo


@dataclass(frozen=True)
class EvalOptions:
    run: str = argument("the run directory")
    fractions: str | None = option(None, "label fractions, separated by commas [those of the run]")
    classifier: str | None = option(None, "linear, finetuned, auto (the better one) or paper [that of the run]")
    supervised: bool = option(False, "also train the supervised baselines on the same labels")


@dataclass(frozen=True)
class ReportOptions:
    runs: tuple[str, ...] = argument("run directories", ())
    out: str | None = option(None, "the HTML file [report.html in the run directory, or in this one for several runs]")


@dataclass(frozen=True)
class DemoOptions:
    out: str | None = option(None, "a new directory for the results [runs/demo]")


@dataclass(frozen=True)
class RunCommandOptions(RunOptions):
    plan: bool = option(False, "only say what would be learned and whether this machine keeps up, and stop")


def run_command(config: RunCommandOptions) -> None:
    if config.plan:
        stream = open_run_stream(config)
        print("\n".join(choose(config, resolve(config, stream), stream, look=True).lines()))
        return
    with closing(Dashboard()) as dashboard:
        path, results = run(config, dashboard=dashboard)
        directory = RunDirectory(path)
        _show_results(directory, results)
        if not results["labels"]:
            print("no classifier yet: the stream has no labelled test images")
        print(f"report: {path / 'report.html'}")
        if then := next_step(directory):
            print(f"next: {then}")
        dashboard.stay()


def eval_command(config: EvalOptions) -> None:
    directory = RunDirectory.existing(config.run)
    own = directory.config
    own = dataclasses.replace(
        own,
        fractions=config.fractions or own.fractions,
        classifier=config.classifier or own.classifier,
        supervised=config.supervised,
    )
    before = {key: value for key, value in (directory.results or {}).items() if key != "supervised"}
    results = evaluate_run(own, directory.load_model(), open_run_stream(own), directory)
    if not results["labels"]:
        raise UserError(f"{own.source} has no labelled test images to evaluate on: label some with streamclr label")
    directory.save_results(before | results)
    _show_results(directory, results)


def _show_results(directory: RunDirectory, results: dict[str, Any]) -> None:
    path, plan = directory.path, directory.config
    write_report([path], path / "report.html", title=f"{plan.source}, {plan.policy}")
    if results["labels"]:
        results_table([(path.name, directory)]).print()
    if supervised := results.get("supervised"):
        names = {"end_to_end": "end to end", "untrained_encoder": "head on an untrained encoder"}
        rows = [[name, *(percent(supervised[f][key]) for f in supervised)] for key, name in names.items()]
        Table("Supervised baselines", ["", *(labels_heading(f) for f in supervised)], rows).print()


def report_command(config: ReportOptions) -> None:
    paths = [RunDirectory.existing(path).path for path in config.runs]
    out = Path(config.out) if config.out else (paths[0] if len(paths) == 1 else Path()) / "report.html"
    if out.is_dir():
        raise UserError(f"{out} is a directory: give a file, as --out {out / 'report.html'}")
    if out.is_file() and not is_report(out):
        raise UserError(f"{out} exists already and is no report: give another --out, nothing else is overwritten")
    print(f"report: {write_report(paths, out, title=', '.join(path.name for path in paths))}")


def compare_command(config: CompareOptions) -> None:
    _print_comparison(*compare(config))


def demo_command(config: DemoOptions) -> None:
    _print_comparison(*demo(config.out))


def _print_comparison(out: Path, table: Table) -> None:
    table.print()
    print(f"report: {out / 'report.html'}")


def doctor_command(config: DoctorOptions) -> int:
    plan, diagnosis = diagnose(config)
    if not config.json:
        for name, text in [*diagnosis.rows(), ("command", command(plan, as_run(config)))]:
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
