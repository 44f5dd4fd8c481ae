"""Waiting for another thread or process."""

import time


def until(condition, seconds=60):
    """Wait until it is true; the time is one after which it will never be, on the slowest machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
