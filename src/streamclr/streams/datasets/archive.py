"""Tar and zip archives of official files."""

import lzma
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from streamclr.base.errors import UserError

DAMAGE = (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, MemoryError, zlib.error, lzma.LZMAError)
# A RuntimeError is raised for what zipfile does not know: a password, another compression.
ZIP_DAMAGE = (*DAMAGE, zipfile.BadZipFile, struct.error, RuntimeError)


@contextmanager
def open_archive(place: Path) -> Iterator[tarfile.TarFile]:
    """Open a tar archive, compressed or not; an error names it if it is damaged, truncated or not an archive."""
    try:
        with tarfile.open(place) as archive:
            yield archive
            while archive.fileobj and archive.fileobj.read(2**20):
                pass  # to its end, where a compressed archive has its checksum
    except DAMAGE as error:
        raise _not_whole(place, error) from None


@contextmanager
def unpacked(*archives: Path) -> Iterator[Path]:
    """A temporary folder with the files of archives, tar or zip. An error in the block names the first of them."""
    with tempfile.TemporaryDirectory(prefix="streamclr-") as temporary:
        for place in archives:
            if zipfile.is_zipfile(place):
                _unzip(place, temporary)
            else:
                with open_archive(place) as archive:
                    archive.extractall(temporary, filter="data")
        try:
            yield Path(temporary)
        except UserError as error:  # which names the temporary folder
            inside = str(error).replace(f"{temporary}/", "").replace(temporary, "it").removesuffix(": get it again")
            raise UserError(f"{archives[0]} is not whole, or another archive ({inside}): get it again") from None


def _unzip(place: Path, directory: str) -> None:
    try:
        with zipfile.ZipFile(place) as archive:
            for path in map(PurePosixPath, archive.namelist()):
                if path.is_absolute() or ".." in path.parts:
                    raise zipfile.BadZipFile(f"{str(path)!r} is outside of its folder")
            archive.extractall(directory)
    except ZIP_DAMAGE as error:
        raise _not_whole(place, error) from None


def _not_whole(place: Path, error: BaseException) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(f"{place} is not a whole archive ({reason}): get it again")
