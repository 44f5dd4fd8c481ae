"""States of a run on the disk: written completely or not at all, and checked before they are used.

A checkpoint is a directory, named by the number of its step: state.safetensors with the tensors of a state, and
manifest.json with everything else and the SHA-256 of both. It appears by one rename: complete or not at all.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.files import sha256_of, sync, write_new
from streamclr.base.progress import say
from streamclr.base.tensors import load_tensors, safetensors_parts


class Checkpoints:
    """The last `keep` states of a run, in a directory of their own."""

    def __init__(self, directory: Path, keep: int = 3):
        self.directory, self.keep = directory, keep

    def save(self, number: int, state: Mapping[str, Any]) -> int:
        """Write a state, flush it to the disk, and drop the oldest. Returns the number of bytes written."""
        final, part = self.directory / f"{number:010}", self.directory / f".part-{number:010}"
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in self.directory.glob(".part-*"):  # left by a killed process
            shutil.rmtree(left, ignore_errors=True)
        try:
            os.mkdir(part)
            tensors: dict[str, Tensor] = {}
            tree = _without_tensors(state, "", tensors)
            sha256, n_tensors = write_new(part / STATE, safetensors_parts(tensors))
            manifest = _manifest({"number": number, "sha256": sha256, "bytes": n_tensors, "state": tree})
            _, n_manifest = write_new(part / MANIFEST, [manifest])
            sync(part)
            shutil.rmtree(final, ignore_errors=True)  # of a run that resumed from an earlier step
            os.rename(part, final)
            sync(self.directory)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        for old in self.numbers()[: -self.keep]:
            shutil.rmtree(self.directory / f"{old:010}", ignore_errors=True)
        return n_tensors + n_manifest

    def drop_after(self, number: int) -> None:
        """Delete the checkpoints after a step: the run resumes from there."""
        for later in self.numbers():
            if later > number:
                shutil.rmtree(self.directory / f"{later:010}")

    def numbers(self) -> list[int]:
        """The steps that have a checkpoint, intact or damaged, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal())

    def latest(self, most: float = math.inf) -> tuple[int, dict[str, Any]] | None:
        """Number and state of the newest intact checkpoint up to step `most`; damaged ones are reported and skipped."""
        for number in reversed([number for number in self.numbers() if number <= most]):
            try:
                return number, self.load(number)
            except (UserError, FileNotFoundError) as error:
                say(f"streamclr: {error}; going back to the checkpoint before")
            except OSError as error:  # not damaged, only unreadable now: resuming from an older one would lose it
                reason = error.strerror or error
                raise UserError(f"{self.directory}/{number:010} cannot be read ({reason}): try again") from None
        return None

    def load(self, number: int) -> dict[str, Any]:
        """Load a state, after checking every byte of it."""
        content, file = self._manifest(number), self.directory / f"{number:010}" / STATE
        if sha256_of(file) != content["sha256"]:
            raise UserError(f"{file} is damaged: its checksum differs")
        return _with_tensors(content["state"], load_tensors(file))

    def facts(self, number: int) -> dict[str, Any]:
        """A state without its tensors, which are not read."""
        return self._manifest(number)["state"]

    def _manifest(self, number: int) -> dict[str, Any]:
        path = self.directory / f"{number:010}"
        content = _read_manifest(path / MANIFEST)
        if content["number"] != number:
            raise UserError(f"{path} is damaged: it is the checkpoint of step {content['number']}")
        return content


class Pace:
    """When a checkpoint is due: every N steps or minutes, less often where that would write more than a GiB an hour."""

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
        """Whether to save now; call it once after each step."""
        self._n_steps += 1
        in_time = bool(self.seconds) and time.monotonic() - self._last >= self._wait
        return (self.steps is not None and self._n_steps >= self.steps) or in_time

    def save(self, number: int, state: Mapping[str, Any]) -> bool:
        """Save a checkpoint. A full or failing disk is reported and the run goes on: earlier checkpoints are intact."""
        self._last, self._n_steps = time.monotonic(), 0
        try:
            n_bytes = self.checkpoints.save(number, state)
            self._wait = max(self.seconds, 3600 * n_bytes / MAX_BYTES_PER_HOUR)
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


MAX_BYTES_PER_HOUR = 2**30
STATE, MANIFEST = "state.safetensors", "manifest.json"
_TENSOR = "$tensor"  # the manifest has {"$tensor": name} in place of a tensor


def _without_tensors(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with a name in place of each tensor; the tensors go into `tensors`."""
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


def _manifest(content: dict[str, Any]) -> bytes:
    """A line with the checksum of the rest, then the content as JSON."""
    text = json.dumps(content, allow_nan=True).encode()
    return json.dumps({"manifest_sha256": hashlib.sha256(text).hexdigest()}).encode() + b"\n" + text + b"\n"


def _read_manifest(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    with suppress(ValueError, KeyError, TypeError, UnicodeDecodeError):
        content = json.loads(raw.partition(b"\n")[2])
        if raw == _manifest(content):  # byte by byte, its checksum included
            return content
    raise UserError(f"{path} is damaged: its checksum differs")
