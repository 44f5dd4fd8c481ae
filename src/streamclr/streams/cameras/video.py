"""Video by PyAV: recordings, RTSP and other network streams, cameras by V4L2."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from PIL import Image

from streamclr.base.errors import UserError
from streamclr.base.extras import how_to_install
from streamclr.base.files import near
from streamclr.streams.frame import BadFrame, Frame, Spare

try:
    import av
    import av.error

    VideoError = av.error.FFmpegError
except ImportError:  # the extra is not installed: only video itself needs it

    class VideoError(Exception):  # type: ignore[no-redef]
        """Stands for FFmpeg's error; never raised."""


Undecoded = tuple[Callable[[Spare], Frame], float]  # what makes a frame, and its time in seconds


def check_installed() -> None:
    if "av" not in globals():
        raise UserError(f"video and cameras need PyAV: {how_to_install('video')}")


def frame_size(path: str) -> tuple[int, int]:
    """Width and height of a recording's frames; an error if the file is not a video."""
    if not os.path.exists(path):
        raise UserError(f"no file {path}: {near(path) or 'give a video file'}")
    try:
        with _opened(path) as container:
            codec = container.streams.video[0].codec_context
            return codec.width, codec.height
    except (OSError, VideoError) as error:
        raise UserError(f"cannot play {path!r} ({error.strerror}): give a video file") from None


def frame_rate(path: str) -> float | None:
    """Frames a second of a recording, if the file has the rate."""
    with _opened(path) as container:
        rate = container.streams.video[0].average_rate
    return float(rate) if rate else None


@contextmanager
def _opened(url: str, **how: Any) -> Iterator[Any]:
    """A container that has video."""
    with av.open(url, **how) as container:
        if not container.streams.video:
            raise OSError(0, "there is no video in it")
        yield container


def frames(url: str, **how: Any) -> Iterator[Undecoded]:
    """The frames of a recording, a camera or a network stream, in order. how: arguments of `av.open`."""
    av.logging.set_level(av.logging.PANIC)  # damaged frames are counted in the account instead
    try:
        with _opened(url, **how) as container:
            stream, n = container.streams.video[0], 0
            rate = float(stream.average_rate or 25)
            for packet in container.demux(stream):
                try:
                    decoded = packet.decode()
                except av.error.InvalidDataError:
                    decoded = [None]
                for frame in decoded:
                    n += 1
                    seconds = n / rate if frame is None or frame.time is None else frame.time
                    yield partial(_whole, frame), seconds
    except av.error.ExitError:
        raise TimeoutError(f"no frame for {how['timeout']:g} s") from None


def _whole(frame: "av.VideoFrame | None", spare: Spare) -> Frame:
    """spare: of no use here, where the whole frame is decoded already."""
    if frame is None or frame.is_corrupt:
        raise BadFrame("a frame of the video", "damaged", "the decoder could not make a whole picture of it")
    try:
        pixels = frame.to_ndarray(format="rgb24")
        return Frame(Image.fromarray(pixels), (frame.width, frame.height))
    except (VideoError, ValueError) as error:
        raise BadFrame("a frame of the video", "damaged", error) from None
