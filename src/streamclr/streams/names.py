"""Which files are images, and the order of their names."""

import re
from pathlib import Path

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


def natural_key(path: Path) -> list[tuple[int, int | str]]:
    """Sort key with frame2 before frame10; the plain name decides ties."""
    parts = re.split("([0-9]+)", path.name.lower())
    key: list[tuple[int, int | str]] = [(0, int(p)) if p[0] in "0123456789" else (1, p) for p in parts if p]
    return [*key, (2, path.name)]
