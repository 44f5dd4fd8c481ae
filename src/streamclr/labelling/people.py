"""Several people who label one run at the same time: nobody is asked what another is looking at."""

import time
from collections.abc import Callable, Sequence

AWAY_SECONDS = 60.0  # a page that has not asked for so long is closed or hidden


class People:
    """Which pages are open, and which questions each of them shows or will show next."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seen: dict[str, float] = {}  # when a page asked last
        self._given: dict[str, list[str]] = {}  # the questions that it got

    def __len__(self) -> int:
        """Pages that asked lately."""
        return len(self._seen)

    def share(self, page: str, keys: Sequence[str], n: int) -> list[str]:
        """n of these questions for a page, in their order. Those that other pages have come last, from the end."""
        now = self._clock()
        self._seen = {one: at for one, at in self._seen.items() if now - at < AWAY_SECONDS} | {page: now}
        taken = {key for one in self._seen if one != page for key in self._given.get(one, ())}
        free = [key for key in keys if key not in taken]
        own = (free + [key for key in reversed(keys) if key in taken])[:n]
        self._given = {one: self._given.get(one, []) for one in self._seen} | {page: own}
        return own
