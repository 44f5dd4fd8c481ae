"""Reads plain data from a pickle without executing anything in it.

A pickle is a program for a small stack machine. The one here knows the instructions that build dicts, lists, tuples,
text, numbers and numpy arrays, as in CIFAR's official python version, and refuses every other call. Python's own
`Unpickler`, with every name refused, still crashes on a deep tuple as a key and allocates gigabytes for nine bytes.
"""

import pickletools
import re
from typing import Any

import numpy as np

from streamclr.base.errors import UserError

_MARK = object()


class _Name(str):
    """A global that the pickle names, `module.attribute`; never imported."""


class _Array:
    """A numpy array or dtype under construction."""

    def __init__(self, *made_with: Any):
        self.made_with = made_with
        self.state: Any = None


def read_pickle(data: bytes, where: str) -> Any:
    """What the pickle holds; `where` names it in errors."""
    try:
        return _finish(_run(data), {})
    except UserError as error:
        raise UserError(f"{where} {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, MemoryError, OverflowError, RecursionError) as error:
        raise UserError(f"{where} is not a whole pickle ({error}): get the file again") from None


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        start = len(stack) - 1 - stack[::-1].index(_MARK)
        items = stack[start + 1 :]
        del stack[start:]
        return items

    arg: Any
    for opcode, arg, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                stack.append(_MARK)
            case "POP":
                stack.pop()
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[opcode.name]())
            case "DICT":
                stack.append(dict(_pairs(pop_to_mark())))
            case "LIST":
                stack.append(pop_to_mark())
            case "TUPLE":
                stack.append(tuple(pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                n = int(opcode.name[-1])
                stack[-n:] = [tuple(stack[-n:])]
            case "APPEND" | "APPENDS":
                items = pop_to_mark() if opcode.name == "APPENDS" else [stack.pop()]
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = pop_to_mark() if opcode.name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                stack[-1].update(_pairs(items))
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "GLOBAL":
                stack.append(_Name(arg.replace(" ", ".")))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(_Name(f"{module}.{attribute}"))
            case "REDUCE":
                args, function = stack.pop(), stack.pop()
                stack.append(_call(function, args))
            case "BUILD":
                state = stack.pop()
                if not isinstance(stack[-1], _Array):
                    raise UserError("sets the state of an object that is not a numpy array: it is refused")
                stack[-1].state = state
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":  # python 2's str, which is bytes
                stack.append(arg.encode("latin1") if isinstance(arg, str) else arg)
            case name if opcode.arg is not None and not name.startswith(("EXT", "PERSID", "INST")):
                stack.append(arg)  # integers, floats, text, bytes: the argument is the value
            case name:
                raise UserError(f"holds the pickle instruction {name}, which builds no plain data: it is refused")
    raise ValueError("it does not end")


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    """Pairs from alternating keys and values. No tuples as keys: the hash of a deep one overflows the C stack."""
    if not all(isinstance(key, str | bytes | int | float | None) for key in items[::2]):
        raise UserError("holds a dict whose keys are not text or numbers: it is refused")
    return list(zip(items[::2], items[1::2], strict=True))


def _call(function: Any, args: tuple[Any, ...]) -> Any:
    name = str(function).replace("numpy._core.", "numpy.core.")
    if isinstance(function, _Name):
        if name == "numpy.core.multiarray._reconstruct":
            return _Array()
        if name in ("numpy.dtype", "numpy.core.numeric._frombuffer"):
            return _Array(name, *args)
        if name == "_codecs.encode":  # how python 3 writes bytes in protocol 2
            return args[0].encode(args[1])
        if name == "builtins.bytearray" and len(args) <= 1:
            return bytearray(*args) if args and isinstance(args[0], bytes) else bytearray()
    raise UserError(f"calls {function}, which is no plain data: it is refused")


def _finish(value: Any, done: dict[int, Any]) -> Any:
    """The value with its arrays built; shared values are built once."""
    if not isinstance(value, dict | list | tuple | _Array | _Name):
        return value
    if id(value) not in done:
        done[id(value)] = _MARK  # under construction
        done[id(value)] = _finished(value, done)
    if done[id(value)] is _MARK:
        raise UserError("holds a list or dict that contains itself: it is refused")
    return done[id(value)]


def _finished(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _finish(item, done) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_finish(item, done) for item in value)
    if isinstance(value, _Name):
        return str(value)
    if value.made_with:  # _frombuffer(buffer, dtype, shape, order)
        _, buffer, dtype, shape, order = value.made_with
        return np.frombuffer(buffer, _dtype(dtype)).reshape(shape, order=order)
    _, shape, dtype, fortran, buffer = value.state
    if isinstance(buffer, str):
        buffer = buffer.encode("latin1")
    return np.frombuffer(buffer, _dtype(dtype)).reshape(shape, order="F" if fortran else "C")


def _dtype(value: _Array) -> np.dtype:
    code = value.made_with[1]
    text = code.decode() if isinstance(code, bytes) else code
    if not re.fullmatch("[<>|=]?[uifb][0-9]{1,2}", text):
        raise UserError(f"holds an array of dtype {text}: only numbers are read")
    order = value.state[1] if value.state else "<"
    return np.dtype(text).newbyteorder(">" if order in (">", b">") else "<")
