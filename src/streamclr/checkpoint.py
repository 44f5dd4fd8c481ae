"""Weights in safetensors, written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from streamclr.errors import UserError


def write_json(path: Path, content: Any) -> None:
    """JSON that a reader sees whole or not at all; NaN becomes null."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(_plain(content), indent=1, allow_nan=False) + "\n")  # ASCII, whatever the locale
    part.replace(path)


def json_line(content: dict[str, Any]) -> str:
    return json.dumps(_plain(content), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def save_tensors(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part, metadata)
    except SafetensorError as error:
        raise UserError(f"cannot write {path} ({error})") from None
    part.chmod(0o644)  # safetensors makes it private, unlike every other file of the run
    part.replace(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"no file {path}")
    try:
        with safe_open(path, "pt") as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error})") from None


def load_weights(module: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Load weights by name; what is missing, left over or of another shape is listed by key."""
    own = module.state_dict()
    if not any(key.endswith("num_batches_tracked") for key in tensors):  # old public weights lack these counters
        tensors = tensors | {key: value for key, value in own.items() if key.endswith("num_batches_tracked")}
    problems = [f"{key} is missing" for key in own if key not in tensors]
    problems += [f"{key} is not known" for key in tensors if key not in own]
    for key in own.keys() & tensors.keys():
        if own[key].shape != tensors[key].shape:
            problems.append(f"{key} is {list(tensors[key].shape)}, not {list(own[key].shape)}")
    if problems:
        raise UserError(f"{where} does not fit the model: {'; '.join(sorted(problems))}")
    module.load_state_dict(tensors)


def load_encoder(encoder: nn.Module, path: Path) -> None:
    """Pre-trained weights for the encoder: torchvision's names, with or without their classifier, or a run's own."""
    tensors = load_tensors(path)
    if any(key.startswith("encoder.") for key in tensors):
        tensors = {key.removeprefix("encoder."): t for key, t in tensors.items() if key.startswith("encoder.")}
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("fc.")}
    load_weights(encoder, tensors, str(path))
