"""argparse parsers, made from the table of commands and from the options dataclass of each command."""

import argparse
import dataclasses
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from itertools import takewhile
from types import NoneType
from typing import Any, NoReturn

from streamclr.base import options
from streamclr.base.errors import UserError
from streamclr.cli.commands import SECTIONS, Command, Group

# Headings for the help of commands with many options. Fields that are not here come first, without a heading.
HEADINGS = {
    "stream": ("source", "images", "epochs", "stc", "size"),
    "buffer": ("policy", "buffer", "batch", "segment", "rescore_every", "weak_view", "fresh", "guards"),
    "encoder": ("encoder", "init", "train", "width", "stem", "norm", "norm_over", "projection"),
    "training": tuple(
        "recipe optimizer lr lr_half weight_decay updates loss temperature positives reach".split()
        + "views crop flip side seed".split()
    ),
    "classifier and labels": (
        "fractions",
        "classifier",
        "spread",
        "supervised",
        "probes",
        "label_budget",
        "label_disk",
    ),
    "answers": ("predict", "to", "threshold", "smooth", "every_frame", "snapshot"),
    "rounds": tuple(
        "rounds round_images momentum slow statistics fraction min_devices deadline patience head_every".split()
    ),
    "run directory": ("out", "resume", "checkpoint_minutes", "checkpoint_steps", "log_disk"),
    "machine": tuple("device memory precision kept_views compile decoders duty metrics serve host port".split()),
}
N_OPTIONS_FOR_HEADINGS = 16
MAX_NAMES_IN_ERROR = 14  # longer lists are left to --help


def parse(argv: Sequence[str]) -> tuple[Callable[[Any], int | None], Any]:
    """The function that the command line asks for, and its configuration."""
    about = "Learn from an unlabelled stream; classify from as few as 1 % labels."
    parser = GroupParser(prog="streamclr", about=about, sections=SECTIONS)
    parser.add_argument("--version", action="version", version=f"streamclr {version('streamclr')}")
    if not argv:
        parser.print_help()
        raise SystemExit(0)
    given = parser.parse_args(list(argv))
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1" and given.prog != "streamclr run":
        raise UserError(f"torchrun is for streamclr run: start {given.prog} without it")
    return given.function, given.config


class Parser(argparse.ArgumentParser):
    def __init__(self, prog: str, about: str):
        super().__init__(
            prog=prog,
            description=about,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28),
        )
        self._positionals.title = "arguments"

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def _hint(self, given: str, allowed: Sequence[str]) -> str:
        """What follows after the mistake: the name that was meant, or all names if they are few."""
        if close := get_close_matches(given, allowed, 1):
            return f": did you mean {close[0]!r}? (see {self.prog} --help)"
        names = f": use {', '.join(allowed)}" if len(allowed) <= MAX_NAMES_IN_ERROR else ""
        return f"{names} (see {self.prog} --help)"


class GroupParser(Parser):
    """Takes the name of a command and passes the rest of the words on to it."""

    def __init__(
        self, prog: str, about: str, sections: Mapping[str, Mapping[str, Command | Group]], default: str | None = None
    ):
        super().__init__(prog, about)
        self.usage = f"{prog} {'RUN | ' if default else ''}COMMAND [options]"
        self.sections, self.default = sections, default
        self.names = [name for section in sections.values() for name in section]
        # argparse asks for a class, but only calls it.
        commands = self.add_subparsers(prog=prog, parser_class=_parser_of)  # type: ignore[call-overload]
        for section in sections.values():
            for name, entry in section.items():
                commands.add_parser(name, entry=entry)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = list(takewhile(lambda word: not word.startswith("-"), args))
        if not args:
            raise UserError(f"a command must follow {self.prog!r}{self._hint('', self.names)}")
        if not words and args[0] not in self._option_string_actions and self.default is None:
            raise UserError(f"no command before {args[0]!r}{self._hint('', self.names)}")
        if words and words[0] not in self.names and (self.default is None or len(words) > 1):
            before = self.prog.removeprefix("streamclr").lstrip()
            name, *allowed = (f"{before} {one}".strip() for one in (words[0], *self.names))
            raise UserError(f"no command {name!r}{self._hint(name, allowed)}")
        if self.default is not None and args[0] not in (*self.names, *self._option_string_actions):
            args = [self.default, *args]
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        for heading, section in self.sections.items():
            formatter.start_section(heading)
            for name, entry in section.items():
                about = entry.summary.replace("%", "%%")
                about += f" `{self.prog} RUN` does the same." if name == self.default else ""
                formatter.add_argument(argparse.Action([], name, help=about))
            formatter.end_section()
        formatter.add_text(f"`{self.prog} COMMAND --help` shows the options of a command.")
        return formatter.format_help()


class CommandParser(Parser):
    """Takes the options of one command, and adds its function and configuration to the namespace."""

    def __init__(self, prog: str, command: Command):
        super().__init__(prog, command.summary)
        self.command = command

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        config = self.command.config
        hints, fields = typing.get_type_hints(config), dataclasses.fields(config)
        self._add_fields(fields, hints)
        given, unknown = super().parse_known_args(args, namespace)
        self._take_source(given)
        if unknown and unknown[0].startswith("-"):
            allowed = [flag(field.name) for field in fields if not field.metadata["positional"]]
            raise UserError(f"no option {unknown[0]!r} in {self.prog}{self._hint(unknown[0].split('=')[0], allowed)}")
        if unknown:
            how = f"write {self.usage}"
            if "source" in vars(given) and os.path.exists(unknown[0]):  # a pattern that the shell has expanded, perhaps
                how = "a command has one --source: a file, a directory, or a pattern in quotes as 'signs/*.jpg'"
            raise UserError(f"unexpected {unknown[0]!r}: {how} (see {self.prog} --help)")
        values = {n: options.convert(v, hints[n], flag(n)) for n, v in vars(given).items() if v is not None}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return argparse.Namespace(prog=self.prog, function=self.command.function, config=config(**values)), []

    def _take_source(self, given: argparse.Namespace) -> None:
        """The source may stand alone, without --source."""
        alone = vars(given).pop("_source", None)
        if alone is not None and given.source is not None:
            raise UserError(f"two sources, {alone!r} and --source {given.source!r}: give one")
        if alone is not None:
            given.source = alone

    def _add_fields(self, fields: Sequence["dataclasses.Field[Any]"], hints: dict[str, Any]) -> None:
        """An argument for each field; a field whose default is empty text must be given."""
        heading_of = {name: heading for heading, names in HEADINGS.items() for name in names}
        groups = {heading: self.add_argument_group(heading) for heading in HEADINGS}
        usage = [self.prog]
        for field in fields:
            about = field.metadata["help"].replace("%", "%%")
            if not any(field.default is one for one in (None, False, "", ())) and not about.endswith("]"):
                about += f" [{field.default}]".replace("%", "%%")
            kinds = [kind for kind in typing.get_args(hints[field.name]) if kind is not NoneType] or [hints[field.name]]
            metavar = {int: "N", float: "X"}.get(kinds[0], "TEXT")
            in_group = groups.get(heading_of.get(field.name, "")) if len(fields) >= N_OPTIONS_FOR_HEADINGS else None
            if field.metadata["positional"]:
                is_list = field.default == ()
                name = field.name.removesuffix("s").upper() if is_list else field.name.upper()
                self.add_argument(field.name, metavar=name, help=about, nargs="+" if is_list else None)
                usage.append(name + " …" * is_list)
                continue
            if field.name == "source" and field.default:
                self.add_argument("_source", metavar="SOURCE", nargs="?", help="the same as --source SOURCE")
                usage.append("[SOURCE]")
            kwargs: dict[str, Any] = {"metavar": metavar, "required": field.default == ""}
            if field.default == ():
                kwargs["action"] = "append"
            elif kinds == [bool]:
                kwargs = {"action": "store_true", "default": None}
            elif field.default == "":
                usage.append(f"{flag(field.name)} {metavar}")
            (in_group or self).add_argument(flag(field.name), dest=field.name, help=about, **kwargs)
        self.usage = " ".join([*usage, "[options]"])


def _parser_of(entry: Command | Group, prog: str, **_: Any) -> Parser:
    if isinstance(entry, Command):
        return CommandParser(prog, entry)
    return GroupParser(prog, entry.summary, {"commands": entry.commands}, entry.default)


def flag(name: str) -> str:
    return "--" + name.strip("_").replace("_", "-")
