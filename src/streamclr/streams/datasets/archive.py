"""An archive of official files."""

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamclr.base.errors import UserError


@contextmanager
def open_archive(place: Path) -> Iterator[tarfile.TarFile]:
    """Packed or not; one that is damaged, cut short or no archive gets a line that names it."""
    try:
        with tarfile.open(place) as archive:
            yield archive
            while archive.fileobj and archive.fileobj.read(2**20):
                pass  # the checksum of a packed one stands behind all that tarfile reads
    except (
        tarfile.TarError, EOFError, OSError, ValueError, OverflowError, MemoryError, zlib.error, lzma.LZMAError,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())
        raise UserError(f"{place} is not a whole archive ({reason}): get it again") from None
