"""The signals that end a run."""

import signal
import threading
from typing import Any

from streamclr.base.errors import QuietExit, Stopped
from streamclr.compute.ranks import OneProcess


class StopSignal:
    """SIGTERM and SIGINT (Ctrl-C) end the loop after the step at hand; the second one at once."""

    signal = 0

    def __init__(self, several: bool = False):
        self._several = several  # ranks of one job

    def __enter__(self) -> "StopSignal":
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def by_any(self, ranks: OneProcess) -> bool:
        """Whether a rank was asked, and so all are."""
        (number,) = ranks.largest(self.signal)
        self.signal = int(number)
        return bool(number)

    def stopped(self, ranks: OneProcess, message: str) -> Stopped | QuietExit:
        """To be raised; rank 0 alone reports it."""
        return QuietExit(128 + self.signal) if ranks.index else Stopped(self.signal, message)

    def _note(self, number: int, _: object) -> None:
        self.signal = number
        self.__exit__()

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        # torchrun ends all ranks as soon as one has failed: what this one has to say comes first, as in `Ranks`.
        ends = self._several and kind is not None
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ends and number == signal.SIGTERM else handler)
