"""Tensors in safetensors files, checked by name, shape and type before they are used."""

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.base.files import write_parts

DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write or replace a safetensors file, flushed to the disk."""
    try:
        write_parts(path, safetensors_parts(tensors, metadata))
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error})") from None


def safetensors_parts(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file, one tensor at a time, so that it is never in memory as a whole."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # The largest elements first, as the safetensors library does: every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        yield memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise UserError(f"no file {path}")
    try:
        with safe_open(path, "pt") as content:
            yield content
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error})") from None


def load_tensors(path: Path, below: str = "") -> dict[str, Tensor]:
    """below: only tensors whose names begin so, by the rest of their names."""
    with _opened(path) as content:
        return {n.removeprefix(below): content.get_tensor(n) for n in content.keys() if n.startswith(below)}  # noqa: SIM118


def tensor_names(path: Path) -> list[str]:
    with _opened(path) as content:
        return list(content.keys())


def load_pth(path: Path) -> dict[str, Tensor]:
    """The weights in a file of torch.save, read with nothing in it executed."""
    if not path.is_file():
        raise UserError(f"no file {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001  a damaged file makes the unpickler raise anything, with advice that is not safe
        raise UserError(f"{path} is no whole file of weights, or holds more than weights: get it again") from None
    if not isinstance(content, dict) or not all(isinstance(one, Tensor) for one in content.values()) or not content:
        raise UserError(f"{path} holds no weights by name: save the state_dict() of a model")
    return {str(name): tensor for name, tensor in content.items()}


def load_metadata(path: Path) -> dict[str, str]:
    """The metadata that `save_tensors` was given."""
    with _opened(path) as content:
        return content.metadata() or {}


def load_checked(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Load tensors of exactly these names, shapes and types, all finite; the header is checked before any is read."""
    with _opened(path) as content:
        slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
        found = {name: f"{one.get_shape()} of {one.get_dtype()}" for name, one in slices.items()}
        own = {name: f"{list(one.shape)} of {DTYPES[one.dtype]}" for name, one in expected.items()}
        if problems := _differences(found, own):
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise UserError(f"{path} does not fit: {'; '.join(problems[:3])}{more}")
        tensors = {name: content.get_tensor(name) for name in expected}
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(f"{path} is damaged: {broken[0]} has values that are not finite")
    return tensors


def load_weights(module: nn.Module, tensors: dict[str, Tensor], where: str, assign: bool = False) -> None:
    """Load weights by name; the error lists what is missing, not known or of another shape.

    where: where the weights came from, for the error.
    assign: use the tensors themselves, for a module on the meta device.
    """
    module.load_state_dict(checked_weights(module, tensors, where), assign=assign)


def checked_weights(module: nn.Module, tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """The weights, if they fit the module; see `load_weights`."""
    own = module.state_dict()
    if not any(key.endswith("num_batches_tracked") for key in tensors):  # old public weights lack these counters
        tensors = tensors | {key: value for key, value in own.items() if key.endswith("num_batches_tracked")}
    found, expected = ({key: str(list(one.shape)) for key, one in each.items()} for each in (tensors, own))
    if problems := _differences(found, expected):
        raise UserError(f"{where} does not fit the model: {'; '.join(problems)}")
    return tensors


def _differences(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """What is wrong with tensors, which are described by their names, shapes and types; sorted."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name[:100]} is not known" for name in found if name not in expected]
    both = [name for name in expected if name in found and found[name] != expected[name]]
    return sorted(problems + [f"{name} is {found[name]}, not {expected[name]}" for name in both])
