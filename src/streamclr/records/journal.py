"""A file of JSON lines that is only ever added to: a full disk costs lines, not the run, and no line is ever broken."""

import os
import threading
from pathlib import Path
from typing import Any

from streamclr.base.files import json_line
from streamclr.base.progress import say


class Journal:
    """For several threads: one may write while another brings it onto the disk.

    what: its name, for the line that says that it cannot be written.
    """

    def __init__(self, path: Path, what: str = "the journal"):
        self._file = path.open("ab", buffering=0)
        self.what, self.size = what, path.stat().st_size
        self._fails = False
        self._lock = threading.Lock()

    def write(self, *lines: dict[str, Any]) -> bool:
        """All of these lines, or none of them if the disk does not take them: False."""
        content = "".join(map(json_line, lines)).encode()
        with self._lock:
            try:
                if self._fails:
                    os.truncate(self._file.fileno(), self.size)  # what was left of the line before
                if os.write(self._file.fileno(), content) < len(content):
                    raise OSError(0, "the disk is full")
                self.size += len(content)
                self._fails = False
            except OSError as error:
                if not self._fails:
                    say(f"streamclr: {self.what} cannot be written ({error.strerror}): going on")
                self._fails = True
        return not self._fails

    def sync(self) -> int:
        """Its size, all of which is on the disk."""
        with self._lock:
            if self._fails:
                os.truncate(self._file.fileno(), self.size)
            os.fsync(self._file.fileno())
            return self.size

    def close(self) -> None:
        self._file.close()
