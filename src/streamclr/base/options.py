"""Names with options in one string, such as `cifar10?stc=500&seed=1`, and fields of command-line options."""

import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import field
from functools import partial
from typing import Any, TypeVar, Union
from urllib.parse import parse_qsl

from streamclr.base.errors import UserError

T = TypeVar("T")


def split(text: str) -> tuple[str, dict[str, str]]:
    """`name?key=value&…` as the name and its options."""
    name, _, query = text.partition("?")
    try:
        return name, dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise UserError(f"cannot read the options in {text!r}: write them as name?key=value&key=value") from None


def file_name(text: str) -> str:
    """`name?key=value&key=value` as the name of a file."""
    return text.translate(str.maketrans("?&:", ",,."))


def build(function: Callable[..., T], options: dict[str, Any], what: str, *args: Any) -> T:
    """Call `function` with options, converting text to the annotated types. Unknown options are an error."""
    return function(*args, **converted(function, options, what, len(args)))


def converted(function: Callable[..., Any], options: dict[str, Any], what: str, n_args: int = 0) -> dict[str, Any]:
    """Options as keyword arguments of `function`, text converted to the annotated types, or those of the defaults.

    n_args: arguments before the options.
    """
    target = function.func if isinstance(function, partial) else function
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    taken = dict(list(inspect.signature(function).parameters.items())[n_args:])
    for name in options:
        if name not in taken:
            how = one_of(name, taken) if taken else "it has no options"
            raise UserError(f"{what} has no option {name!r}: {how}")
    kinds = {name: hints.get(name) or _kind_of(taken[name].default) for name in options}
    return {name: convert(value, kinds[name], f"{what}, option {name}") for name, value in options.items()}


def _kind_of(default: Any) -> Any:
    """Without an annotation; text stays text if the default does not say."""
    return str if default is None or default is inspect.Parameter.empty else type(default)


SWITCH = {"on": True, "off": False}
NAMES = {int: "a whole number", float: "a number", bool: "on or off"}


def convert(value: Any, hint: Any, what: str) -> Any:
    """Text as a value of the annotated type; other values are returned as they are."""
    if not isinstance(value, str) or hint is str:
        return value
    either = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is Union else (hint,)
    kinds = [kind for kind in either if kind is not types.NoneType]
    plain: list[Callable[[str], Any]] = [
        kind for kind in kinds if inspect.isclass(kind) and kind not in (bool, tuple, list, dict)
    ]
    if bool in kinds and value in SWITCH:
        return SWITCH[value]
    for kind in plain:
        with suppress(ValueError):
            return kind(value)
    if not plain and bool not in kinds:
        raise UserError(f"{what} is {value!r}, and cannot be given as text: give it in Python")
    names = [NAMES.get(kind, kind.__name__) for kind in kinds if kind in (*plain, bool)]
    raise UserError(f"{what} is {value!r}: use {' or '.join(names)}")


def parse_size(text: str | int, name: str = "memory") -> int:
    """`600M` or `1.5G` (or `600MiB`, or a number of bytes) as bytes; K, M and G are powers of 1024."""
    if isinstance(text, int):
        size = float(text)
    elif match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE):
        size = float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")
    else:
        raise UserError(f"{name} is {text!r}: write a size as 600M or 1.5G")
    if not 1 <= size < 2**63:
        raise UserError(f"{name} is {text!r}: use a size above 0, as 600M or 1.5G")
    return int(size)


def shown(part: object) -> str:
    """`Name(argument=value)`, with the arguments of its class that are not the usual ones, for a `__repr__`."""
    parameters = inspect.signature(type(part)).parameters.values()
    values = {one.name: getattr(part, one.name) for one in parameters if hasattr(part, one.name)}
    usual = {one.name: one.default for one in parameters}
    changed = ", ".join(f"{name}={value!r}" for name, value in values.items() if value != usual[name])
    return f"{type(part).__name__}({changed})"


def option(default: Any, help: str) -> Any:
    """A field of a command's options. A default of "" means that the user must give it."""
    return field(default=default, metadata={"help": help, "positional": False})


def argument(help: str, default: Any = "") -> Any:
    """A field that is given without a dash; several values with the default ()."""
    return field(default=default, metadata={"help": help, "positional": True})


def checked_seed(seed: int) -> int:
    if not 0 <= seed < 2**63:
        raise UserError(f"seed is {seed}: use a whole number from 0 to 2**63 - 1")
    return seed


def checked_size(size: int) -> int:
    if not 8 <= size <= 4096:
        raise UserError(f"size is {size}: use 8 to 4096 pixels")
    return size


def checked_stc(stc: int) -> int:
    if not 1 <= stc < 2**31:
        raise UserError(f"stc is {stc}: use 1 (no correlation) or more")
    return stc


def one_of(given: str, names: Iterable[str]) -> str:
    """The allowed names for an error message, with a suggestion if one is close to what was given."""
    names = list(names)
    close = difflib.get_close_matches(given, names, 1)
    return (f"did you mean {close[0]!r}? " if close else "") + "use " + ", ".join(names)


def redacted(source: str) -> str:
    """Text without the passwords in its URLs: rtsp://user:***@host/1."""
    for secret in _SECRETS:
        source = secret.sub(r"\1***", source)
    return source


_SECRETS = (
    re.compile(r"(://[^\s:/?#]*:)[^\s/?#]+(?=@)"),
    # A password with an unescaped slash, which an error message may quote. Digits alone are a port.
    re.compile(r"(://[^\s:/?#@\[]*:)(?!\*\*\*@|\d+(?:[/?#\s'\",;)]|$))(?:(?!://)\S)+(?=@)"),
    re.compile(
        r"([?&;/_](?!passes=)(?:pw|pin|sig|[^=&?/\s]*(?:pass?|pwd|psw|secret|token|key|auth|signature|credential)[^=&?/\s]*)=)"
        r"(?:(?!,\w+://|['\"](?:\W|$))[^&#\s])+",
        re.IGNORECASE,
    ),
)
