"""Image files decoded by processes of their own, ahead of the step that needs them.

`python -m streamclr.streams.datasets.decoders` answers requests on standard output:

    request [path, size, what is seen], a line of JSON
    answer  null and a new line, then size x size x 3 bytes; or what a BadFrame is made of, a line of JSON

It ends when its standard input does, so that none is left when the learner is killed. It never imports torch.
"""

import json
import signal
import subprocess
import sys
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import numpy as np

from streamclr.base.errors import UserError
from streamclr.streams.frame import BadFrame
from streamclr.streams.sight import Sight, decode

MAX_DECODERS = 64
Process = subprocess.Popen[bytes]


class Decoders:
    """Processes that decode image files; they start when the first file is asked for.

    n: how many, at most.
    """

    def __init__(self, n: int):
        if not 1 <= n <= MAX_DECODERS:
            raise UserError(f"decoders is {n}: use 0 (decode in this process) to {MAX_DECODERS}")
        self._pool = ThreadPoolExecutor(n, "decoding")  # a thread asks one process at a time, and waits for it
        self._idle: deque[Process] = deque()
        weakref.finalize(self, _end, self._pool, self._idle)  # also when Python ends

    def decode(self, path: Path, size: int, sight: Sight) -> "Future[np.ndarray]":
        """The same as `sight.decode`: size x size x 3."""
        return self._pool.submit(self._decode, path, size, sight)

    def _decode(self, path: Path, size: int, sight: Sight) -> np.ndarray:
        try:
            process = self._idle.pop()
        except IndexError:
            process = _start()
        try:
            pixels = _ask(process, path, size, sight)
        except BadFrame:
            self._idle.append(process)
            raise
        except (OSError, ValueError):
            process.kill()
            what = f"a process ended with code {process.wait()} while it decoded {path}"
            raise UserError(f"{what}: --decoders 0 decodes without other processes") from None
        self._idle.append(process)
        return pixels


def _start() -> Process:
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C goes to the learner, which then ends this process
    )


def _ask(process: Process, path: Path, size: int, sight: Sight) -> np.ndarray:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([str(path), size, asdict(sight)]).encode() + b"\n")
    process.stdin.flush()
    if bad := json.loads(process.stdout.readline()):
        raise BadFrame(*bad)
    return np.frombuffer(process.stdout.read(3 * size**2), np.uint8).reshape(size, size, 3)


def _end(pool: ThreadPoolExecutor, idle: deque[Process]) -> None:
    pool.shutdown(wait=False)  # a thread that waits for a process keeps the Decoders alive: there is none
    for process in idle:
        process.kill()
        process.communicate()


def serve(asks: BinaryIO, answers: BinaryIO) -> None:
    for line in asks:
        path, size, sight = json.loads(line)
        try:
            pixels = decode(Path(path), size, Sight(**sight)).tobytes()
        except BadFrame as error:
            answers.write(json.dumps(error.args).encode() + b"\n")
        else:
            answers.write(b"null\n" + pixels)
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to all: the learner still needs images
    with suppress(BrokenPipeError):  # the learner has ended
        serve(sys.stdin.buffer, sys.stdout.buffer)
