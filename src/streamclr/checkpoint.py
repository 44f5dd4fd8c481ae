"""Weights and whole states in safetensors, written whole or not at all, and checked before they are used."""

import hashlib
import json
import math
import os
import shutil
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from streamclr.errors import UserError
from streamclr.progress import say


def write_json(path: Path, content: Any) -> None:
    """JSON that a reader sees whole or not at all; NaN becomes null."""
    text = json.dumps(_plain(content), indent=1, allow_nan=False) + "\n"  # ASCII, whatever the locale
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """A file that a reader sees whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)  # of a process that was killed and had this number
    try:
        write_new(part, [content])
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


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


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise UserError(f"no file {path}")
    try:
        with safe_open(path, "pt") as content:
            yield content
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error})") from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    with _opened(path) as content:
        return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118


def load_metadata(path: Path) -> dict[str, str]:
    """What `save_tensors` was told beside the tensors."""
    with _opened(path) as content:
        return content.metadata() or {}


def load_checked(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of exactly these names, shapes and types, all of them finite; none is read before the header fits."""
    with _opened(path) as content:
        found = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
        problems = [f"{name} is missing" for name in expected if name not in found]
        problems += [f"{name[:100]} is not known" for name in found if name not in expected]
        for name in expected.keys() & found.keys():
            own = [list(expected[name].shape), _DTYPES[expected[name].dtype]]
            its = [found[name].get_shape(), found[name].get_dtype()]
            if own != its:
                problems.append(f"{name} is {its[0]} of {its[1]}, not {own[0]} of {own[1]}")
        if problems:
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise UserError(f"{path} does not fit: {'; '.join(sorted(problems)[:3])}{more}")
        tensors = {name: content.get_tensor(name) for name in expected}
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(f"{path} is damaged: {broken[0]} has values that are not finite")
    return tensors


def load_weights(module: nn.Module, tensors: dict[str, Tensor], where: str, assign: bool = False) -> None:
    """Load weights by name; what is missing, left over or of another shape is listed by key.

    assign: put the tensors themselves in their place, for a module that was made without memory.
    """
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
    module.load_state_dict(tensors, assign=assign)


def load_encoder(encoder: nn.Module, path: Path) -> None:
    """Weights for the encoder: torchvision's names, with or without classifier and projection head, or a run's own."""
    tensors = load_tensors(path)
    if any(key.startswith("encoder.") for key in tensors):
        tensors = {key.removeprefix("encoder."): t for key, t in tensors.items() if key.startswith("encoder.")}
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(("fc.", "projection."))}
    load_weights(encoder, tensors, str(path))


# ----------------------------------------------------------------------------------------------------------------------
# A checkpoint is a directory, named by the number of its step: state.safetensors with the tensors of a state, and
# manifest.json with everything else in it and the SHA-256 of both. It appears by one rename: whole or not at all.


class Checkpoints:
    """The last few states of a run, in a directory of its own."""

    def __init__(self, directory: Path, keep: int = 3):
        self.directory, self.keep = directory, keep

    def save(self, number: int, state: Mapping[str, Any]) -> int:
        """Write a state, which is on the disk when this returns, and drop the oldest. Returns the bytes written."""
        final, part = self.directory / f"{number:010}", self.directory / f".part-{number:010}"
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in self.directory.glob(".part-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        try:
            os.mkdir(part)
            tensors: dict[str, Tensor] = {}
            tree = _without_tensors(state, "", tensors)
            sha256, n_tensors = write_new(part / STATE, _safetensors(tensors))
            manifest = _manifest({"number": number, "sha256": sha256, "bytes": n_tensors, "state": tree})
            _, n_manifest = write_new(part / MANIFEST, [manifest])
            sync(part)
            shutil.rmtree(final, ignore_errors=True)  # of a run that went back behind it
            os.rename(part, final)
            sync(self.directory)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        for old in self.numbers()[: -self.keep]:
            shutil.rmtree(self.directory / f"{old:010}", ignore_errors=True)
        return n_tensors + n_manifest

    def drop_after(self, number: int) -> None:
        """Forget what came after a step, because the run goes on from there."""
        for later in self.numbers():
            if later > number:
                shutil.rmtree(self.directory / f"{later:010}")

    def numbers(self) -> list[int]:
        """The steps of which there is a checkpoint, whole or damaged, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal())

    def latest(self, most: float = math.inf) -> tuple[int, dict[str, Any]] | None:
        """Number and state of the newest checkpoint that verifies; one that does not is said and passed over.

        most: the number that it may have at most.
        """
        for number in reversed([number for number in self.numbers() if number <= most]):
            try:
                return number, self.load(number)
            except (UserError, FileNotFoundError) as error:
                say(f"streamclr: {error}; going back to the checkpoint before")
            except OSError as error:  # what cannot be read now is not damaged: nothing may be done without it
                where = self.directory / f"{number:010}"
                raise UserError(f"{where} cannot be read ({error.strerror or error}): try again") from None
        return None

    def load(self, number: int) -> dict[str, Any]:
        """A state, of which every byte has been checked."""
        path = self.directory / f"{number:010}"
        content = _read_manifest(path / MANIFEST)
        if content["number"] != number:
            raise UserError(f"{path} is damaged: it is the checkpoint of step {content['number']}")
        if sha256_of(path / STATE) != content["sha256"]:
            raise UserError(f"{path / STATE} is damaged: its checksum differs")
        return _with_tensors(content["state"], load_tensors(path / STATE))


class Pace:
    """When a checkpoint is due: every so many steps and minutes, more of these if it would be above a GiB an hour."""

    def __init__(self, checkpoints: Checkpoints, minutes: float, steps: int | None = None, quiet: bool = False):
        if not 0 <= minutes < math.inf:
            raise UserError(f"checkpoint_minutes is {minutes}: use a number above 0, or 0 for none but the last")
        if steps is not None and steps < 1:
            raise UserError(f"checkpoint_steps is {steps}: use at least 1")
        self.checkpoints, self.seconds, self.steps = checkpoints, 60 * minutes, steps
        self._wait, self._last, self._n_steps = self.seconds, time.monotonic(), 0
        self.n_failed = 0
        self._reported = quiet

    def due(self) -> bool:
        """To be asked once after each step."""
        self._n_steps += 1
        in_time = bool(self.seconds) and time.monotonic() - self._last >= self._wait
        return (self.steps is not None and self._n_steps >= self.steps) or in_time

    def save(self, number: int, state: Mapping[str, Any]) -> bool:
        """A disk that is full or fails is said, and the run goes on: the checkpoints before this one are whole."""
        self._last, self._n_steps = time.monotonic(), 0
        try:
            n_bytes = self.checkpoints.save(number, state)
            self._wait = max(self.seconds, 3600 * n_bytes / MOST_AN_HOUR)
            if self.seconds and not self._reported:
                an_hour = 3600 / self._wait * n_bytes / 2**30
                how_often = f"one every {self._wait / 60:.0f} minutes, {an_hour:.2g} GiB an hour"
                say(f"checkpoints of {n_bytes / 2**20:.1f} MiB, {how_often}")
            self._reported = True
        except OSError as error:
            return self.failed(number, error)
        return True

    def failed(self, number: int, error: OSError) -> bool:
        self.n_failed += 1
        say(f"streamclr: no checkpoint of step {number} ({error.strerror or error}): going on")
        return False


MOST_AN_HOUR = 2**30  # bytes
STATE, MANIFEST = "state.safetensors", "manifest.json"
_TENSOR = "$tensor"  # in the manifest stands {"$tensor": name} for a tensor
_DTYPES = {
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


def _without_tensors(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with a name for each tensor, which goes into `tensors`."""
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return {_TENSOR: name}
    if isinstance(tree, Mapping):
        if bad := [key for key in tree if not isinstance(key, str) or key == _TENSOR]:
            raise UserError(f"{name} cannot be saved: the keys of a state are text, not {bad[0]!r}")
        return {key: _without_tensors(value, f"{name}/{key}" if name else key, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without_tensors(value, f"{name}/{i}", tensors) for i, value in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise UserError(f"{name} cannot be saved: a state has tensors, numbers and text, not {type(tree).__name__}")


def _with_tensors(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {_TENSOR}:
            return tensors[tree[_TENSOR]]
        return {key: _with_tensors(value, tensors) for key, value in tree.items()}
    return [_with_tensors(value, tensors) for value in tree] if isinstance(tree, list) else tree


def _safetensors(tensors: dict[str, Tensor]) -> Iterable[bytes | memoryview]:
    """The parts of a safetensors file, a tensor at a time, so that it is never in memory as a whole."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors.values():
        yield memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def write_new(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """A new file, on the disk itself. Returns the SHA-256 and the size of what was written."""
    digest, size = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for part in parts:
            digest.update(part)
            size += len(part)
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)
    return digest.hexdigest(), size


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def sync(directory: Path) -> None:
    """Names in a directory are on the disk only after this."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _manifest(content: dict[str, Any]) -> bytes:
    """A line with the checksum of the rest, and the content in JSON."""
    text = json.dumps(content, allow_nan=True).encode()
    return json.dumps({"manifest_sha256": hashlib.sha256(text).hexdigest()}).encode() + b"\n" + text + b"\n"


def _read_manifest(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    with suppress(ValueError, KeyError, TypeError, UnicodeDecodeError):
        content = json.loads(raw.partition(b"\n")[2])
        if raw == _manifest(content):  # byte by byte, its checksum included
            return content
    raise UserError(f"{path} is damaged: its checksum differs")
