"""Tar archives of official files."""

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamclr.base.errors import UserError

DAMAGE = (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, MemoryError, zlib.error, lzma.LZMAError)


@contextmanager
def open_archive(place: Path) -> Iterator[tarfile.TarFile]:
    """Open a tar archive, compressed or not; an error names it if it is damaged, truncated or not an archive."""
    try:
        with tarfile.open(place) as archive:
            yield archive
            while archive.fileobj and archive.fileobj.read(2**20):
                pass  # to its end, where a compressed archive has its checksum
    except DAMAGE as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{place} is not a whole archive ({reason}): get it again") from None
