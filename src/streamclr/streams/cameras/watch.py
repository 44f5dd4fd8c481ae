"""Images that are written into a directory."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from streamclr.streams.frame import SUFFIXES, natural_key

POLL_SECONDS = 0.2


def watch(directory: str, after: Any = None) -> Iterator[tuple[Path, tuple[int, str]]]:
    """Each image file once, as soon as it is complete, with a mark from which to resume.

    A file counts as complete when it has not changed between two polls. Waiting files come in the order of their
    modification times, then by name.

    after: the mark of the last file before a restart.
    """
    before = _look(directory)
    taken = {name for name, (written, _) in before.items() if after and _order(written, name) <= _order(*after)}
    while True:
        time.sleep(POLL_SECONDS)
        present = _look(directory)
        taken &= present.keys()  # a name may be used again after its file was removed
        whole = [name for name, state in present.items() if name not in taken and before.get(name) == state]
        for name in sorted(whole, key=lambda name: _order(present[name][0], name)):
            taken.add(name)
            yield Path(directory, name), (present[name][0], name)
        before = present


def _order(written: int, name: str) -> tuple[int, list[tuple[int, int | str]]]:
    return written, natural_key(Path(name))


def _look(directory: str) -> dict[str, tuple[int, int]]:
    """Modification time and size of each image."""
    found = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if Path(entry.name).suffix.lower() in SUFFIXES and not entry.name.startswith("."):
                with suppress(FileNotFoundError):
                    state = entry.stat()
                    found[entry.name] = (state.st_mtime_ns, state.st_size)
    return found
