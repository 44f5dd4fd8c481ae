"""The command line: parse, construct, loop. One dataclass per command; an error is one line and exit code 2."""

import argparse
import dataclasses
import os
import sys
import typing
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn

from streamclr.base import options
from streamclr.base.errors import QuietExit, Stopped, UserError
from streamclr.base.progress import say
from streamclr.compute.allocator import keep_freed_memory

PACKAGES = ("torch", "numpy", "PIL", "safetensors", "rich", "matplotlib")  # that an installation has


def main(argv: Sequence[str] | None = None) -> int:
    keep_freed_memory()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported, or it warns of what is meant so
    try:
        command, config = parse(sys.argv[1:] if argv is None else argv)
        return command(config) or 0
    except UserError as error:
        say("streamclr: " + " ".join(options.redacted(str(error)).split()))  # one line, whatever it quotes
        return 2
    except BrokenPipeError:  # `streamclr predict … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a directory that may not be read
        print(f"streamclr: {error.strerror or error}: {error.filename or 'no file named'}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:  # a device without torch has all that `predict` needs for an ONNX file
        if error.name not in PACKAGES:
            raise
        print(f"streamclr: this needs {error.name}: pip install -c constraints.txt -e .", file=sys.stderr)
        return 2
    except QuietExit as silent:
        return silent.exit_code
    except Stopped as stopped:
        say(f"streamclr: {stopped}")
        return stopped.exit_code
    except KeyboardInterrupt:
        print("streamclr: interrupted", file=sys.stderr)
        return 130


class Command(NamedTuple):
    """One of the commands, whose module is imported only if it is asked for."""

    summary: str  # the first line of its configuration's documentation
    place: str  # module:function
    positional: tuple[str, ...] = ()  # fields that are written without a dash

    @property
    def function(self) -> Callable[[Any], int | None]:
        module, _, name = self.place.partition(":")
        return getattr(import_module(f"streamclr.{module}"), name)

    @property
    def config(self) -> type:
        """The dataclass that the function takes."""
        return typing.get_type_hints(self.function)["config"]


COMMANDS = {
    "demo": Command(
        "Learn from the built-in stream, train a classifier on 1 % of the labels, compare: three to four minutes.",
        "cli.commands:demo_command",
    ),
    "run": Command("Learn from a stream, then train and test a classifier on few labels.", "cli.commands:run_command"),
    "eval": Command(
        "Train and test the classifier of a finished run again, with other label fractions.",
        "cli.commands:eval_command",
        ("run",),
    ),
    "predict": Command(
        "Classify the images of a source with a run or an exported file: JSON lines, a table, a CSV file.",
        "models.predict:predict",
        ("model",),
    ),
    "rollback": Command(
        "Return to the version before the one that `run --predict` serves, while it runs or not.",
        "cli.commands:rollback_command",
        ("run",),
    ),
    "export": Command(
        "Write encoder and classifier for other programs, and run what was written against PyTorch.",
        "cli.commands:export_command",
        ("run",),
    ),
    "report": Command("Write one HTML page about one run or several.", "cli.commands:report_command", ("runs",)),
    "compare": Command(
        "Run several policies on the same streams and print one table with means and 95 % intervals over the seeds.",
        "cli.commands:compare_command",
    ),
    "reproduce": Command(
        "Run one of the paper's experiments, its numbers beside ours; started again it goes on where it was.",
        "cli.commands:reproduce_command",
        ("name",),
    ),
    "serve": Command(
        "Open the dashboard of runs, those that are learning included.", "cli.commands:serve_command", ("runs",)
    ),
    "label": Command(
        "Ask a person about a run on a page; or `label export RUN FILE`, `label import RUN FILE`, `label train RUN`.",
        "cli.commands:label_command",
        ("words",),
    ),
    "data": Command(
        "Bring a dataset into the cache (STREAMCLR_DATA): from local files, else the official site, else npm.",
        "cli.data:data_command",
        ("action", "name"),
    ),
    "doctor": Command(
        "Say what this machine has, and whether a run with these options keeps up with its camera. Exit code 1: no.",
        "cli.commands:doctor_command",
    ),
    "fleet simulate": Command(
        "Simulate a fleet over parts of a dataset, with Flower's simulation engine, and test its encoder.",
        "cli.fleet:simulate_command",
    ),
    "fleet keys": Command(
        "Make the certificate of a fleet's server, and a key for each device; again: keys for more devices.",
        "cli.fleet:keys_command",
        ("directory",),
    ),
    "fleet server": Command(
        "Serve a fleet: start Flower's SuperLink with TLS, let the registered devices in, and average round by round.",
        "cli.fleet:server_command",
    ),
    "fleet device": Command(
        "Join a fleet: start Flower's SuperNode, and learn from a camera of one's own when the server asks.",
        "cli.fleet:device_command",
    ),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def parse(argv: Sequence[str]) -> tuple[Callable[[Any], int | None], Any]:
    """The command and its configuration from the words on the command line."""
    parser = Parser("streamclr", description="Learn from an unlabelled stream; classify from as few as 1 % labels.")
    parser.add_argument("--version", action="version", version=f"streamclr {version('streamclr')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    if " ".join(argv[:2]) in COMMANDS:
        argv = [" ".join(argv[:2]), *argv[2:]]
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        about = command.summary.replace("%", "%%")
        own = commands.add_parser(name, help=about, description=command.summary, allow_abbrev=False)
        if name == asked:
            add_fields(own, command.config, command.positional)
    if not argv:
        parser.print_help()
        raise SystemExit(0)
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        words = " ".join(takewhile(lambda word: not word.startswith("-"), argv[:2]))
        written = words if get_close_matches(words, [name for name in COMMANDS if " " in name]) else argv[0]
        raise UserError(f"no command {written!r}: {options.one_of(written, COMMANDS)}")
    given, unknown = parser.parse_known_args(argv)
    if given.command is None:
        raise UserError(f"no command before {argv[0]!r}: {options.one_of('', COMMANDS)}")
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1" and given.command != "run":
        raise UserError(f"torchrun is for streamclr run: start streamclr {given.command} without it")
    command = COMMANDS[given.command]
    config, positional = command.config, command.positional
    fields = {field.name: field for field in dataclasses.fields(config)}
    if unknown:
        allowed = [flag(name) for name in fields if name not in positional]
        raise UserError(f"streamclr {given.command} has no {unknown[0]!r}: {options.one_of(unknown[0], allowed)}")
    hints = typing.get_type_hints(config)
    values = {name: value for name, value in vars(given).items() if name in fields and value is not None}
    return command.function, config(
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
