"""A sequence of JPEG files, from standard input or a camera's MJPEG over HTTP."""

import base64
import time
import urllib.request
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit, urlunsplit

SOI = b"\xff\xd8\xff"  # start of an image, and of the marker after it
MAX_JPEG_BYTES = 2**26


class JpegSplitter:
    """Splits bytes into JPEG files and drops what is between them. A truncated file comes out as it is."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._at = 0  # bytes of the first image parsed so far; 0: its start is not yet found
        self._in_scan = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._bytes += data
        while (image := self._next()) is not None:
            if image:
                yield image

    def rest(self) -> Iterator[bytes]:
        """The incomplete image at the end of the data."""
        is_started = self._at > 0
        image = self._cut(len(self._bytes))
        if is_started:
            yield image

    def _next(self) -> bytes | None:
        """The first image, as soon as it is complete."""
        data = self._bytes
        if not self._at:
            start = data.find(SOI)
            if start < 0:
                del data[:-2]
                return None
            del data[:start]
            self._at = 2
        while self._at + 2 <= len(data):
            if self._in_scan:
                self._at = data.find(b"\xff", self._at)
                if self._at < 0:
                    self._at = len(data)
                elif self._at + 2 <= len(data):
                    after = data[self._at + 1]
                    self._in_scan = after in (0, 0xFF, *range(0xD0, 0xD8))  # a byte of the scan, a filler, a restart
                    self._at += self._in_scan * (1 if after == 0xFF else 2)
                continue
            marker = data[self._at + 1]
            if data[self._at] != 0xFF or marker == 0xD8:  # damaged, or the start of another image
                return self._give_up()
            if marker == 0xD9:
                return self._cut(self._at + 2)
            if marker == 0xFF:
                self._at += 1
            elif marker == 0x01 or 0xD0 <= marker <= 0xD7:
                self._at += 2
            elif self._at + 4 <= len(data):
                self._at += 2 + int.from_bytes(data[self._at + 2 : self._at + 4], "big")
                self._in_scan = marker == 0xDA
            else:
                break
        return self._give_up() if len(data) > MAX_JPEG_BYTES else None

    def _give_up(self) -> bytes:
        """A damaged image ends where the next one begins."""
        start = self._bytes.find(SOI, 2)
        return self._cut(start if start > 0 else min(len(self._bytes), max(2, self._at)))

    def _cut(self, end: int) -> bytes:
        image = bytes(self._bytes[:end])
        del self._bytes[:end]
        self._at, self._in_scan = 0, False
        return image


def mjpeg(url: str, timeout: float) -> Iterator[bytes]:
    """The images of a camera's MJPEG stream; an OSError if the server sends no JPEG within `timeout` seconds."""
    parts = urlsplit(url)
    plain = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    request = urllib.request.Request(plain, headers={"User-Agent": "streamclr"})
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        # The password does not go to another host if the camera redirects.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(secret).decode()}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a camera is on the local network
    with opener.open(request, timeout=timeout) as response:
        kind = response.headers.get_content_type()
        if kind != "image/jpeg" and not kind.startswith("multipart/"):
            raise OSError(f"the server sends {kind}, not MJPEG")
        splitter, last = JpegSplitter(), time.monotonic()
        while data := response.read1(2**16):
            for image in splitter.feed(data):
                last = time.monotonic()
                yield image
            if time.monotonic() - last > timeout:  # the server may send bytes, but no whole frame
                raise TimeoutError(f"no frame for {timeout:g} s")
        yield from splitter.rest()
