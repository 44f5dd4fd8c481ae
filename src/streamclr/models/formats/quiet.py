"""Silence for exporters, which say much that is not for a user."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters say much that is not for a user, those that are not in Python straight to stderr."""
    before, stderr = logging.root.manager.disable, os.dup(2)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nothing:
            warnings.simplefilter("ignore")
            sys.stderr.flush()
            os.dup2(nothing.fileno(), 2)
            yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        logging.disable(before)
