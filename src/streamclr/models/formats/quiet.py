"""Silence for exporters, which say much that is not for a user."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and log lines of Python."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """The same, and nothing on the file descriptor of stderr."""
    # For ExecuTorch only: its C++ library logs to descriptor 2 when it is loaded, and has no setting for that. Lines of
    # other threads are lost meanwhile, but an export is a command of its own.
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with quiet(), open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
            yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
