"""Where datasets, weights and measurements are kept."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`STREAMCLR_DATA`, or `streamclr` in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamclr"
    return Path(os.environ.get("STREAMCLR_DATA") or default).expanduser()
