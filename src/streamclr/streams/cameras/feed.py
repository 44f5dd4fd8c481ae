"""One camera or recording: its address, its options, and how it is opened."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from streamclr.base.errors import UserError
from streamclr.base.files import near
from streamclr.base.options import checked_size, redacted
from streamclr.streams.cameras import video
from streamclr.streams.cameras.gates import Hours, parse_motion
from streamclr.streams.cameras.jpegs import JpegSplitter, mjpeg
from streamclr.streams.cameras.video import VideoError
from streamclr.streams.cameras.watch import watch
from streamclr.streams.frame import Frame, Spare, open_frame, track_name
from streamclr.streams.sight import FIT, Sight, make_sights


class Raw(NamedTuple):
    """A frame that is not yet decoded, so that passing it over costs little."""

    decode: Callable[[Spare], Frame]  # raises BadFrame
    mark: Any = None  # after it, from which the source resumes
    seconds: float | None = None  # its time in a recording; None: now
    track: str = ""  # frames with different ones are apart
    file: str = ""  # its path, if it has a file of its own
    taken: float | None = None  # when it was, in seconds of the clock; None: now


@dataclass(frozen=True)
class Feed:
    """One camera or recording, with its options.

    kind: camera, rtsp, http, stdin, watch or video.
    drops: if the learner is too slow, the oldest waiting frames are passed over; else the source waits.
    fps: at most that many frames a second.
    every: every Nth frame.
    timeout: seconds without a frame after which a connection counts as lost.
    retries: how often in a row a connection is tried again; None: without limit.
    tracks: `name` takes the part of a file name before the last `_` as the frame's track; None: not known.
    passes: how often a recording is read.
    sights: what is seen of each frame; several are regions, each of which gives frames of its own.
    motion: per cent of what is seen that must have changed since the last frame that was handed out; None: all come.
    between: local times as `06:00-20:00`; None: always.
    thumbnail_every: every Nth frame comes with a JPEG for people; 0: none.
    queue: the largest number of waiting frames.
    place: where to resume, see `capture.Place`.
    """

    kind: str
    where: str
    size: int
    drops: bool = True
    fps: float | None = None
    every: int = 1
    timeout: float = 10.0
    retries: int | None = None
    tracks: str | None = None
    passes: int = 1
    sights: tuple[Sight, ...] = (Sight(),)
    motion: float | None = None
    between: str | None = None
    thumbnail_every: int = 0
    queue: int = 512
    place: tuple[Any, ...] = ()

    @classmethod
    def of(cls, content: dict[str, Any]) -> "Feed":
        """From what `dataclasses.asdict` made of one, by way of JSON."""
        sights = tuple(Sight(**sight) for sight in content["sights"])
        return cls(**content | {"sights": sights, "place": tuple(content["place"])})

    @property
    def name(self) -> str:
        """What people know it by."""
        return "stdin" if self.kind == "stdin" else redacted(self.where)

    @property
    def places(self) -> dict[str, tuple[str, str]]:
        """For each region its whole name: the name of the camera, and its own, empty where there is but one."""
        found = [(self.name, sight.name) for sight in self.sights]
        return {f"{camera}#{region}" if region else camera: (camera, region) for camera, region in found}

    @property
    def ends(self) -> bool:
        """Whether the source can end; if a camera stops sending, its connection is lost."""
        return self.kind in ("video", "stdin")

    @property
    def exact(self) -> bool:
        """Whether it always gives the same frames: a recording that waits for the learner."""
        return self.kind == "video" and not self.drops

    def open(self, mark: Any) -> Iterator[Raw]:
        """Frames after a mark, until the source ends; raises one of CONNECTION_ERRORS if it is lost."""
        if self.kind in ("camera", "rtsp"):  # RTSP over TCP: over UDP a lost packet smears frames
            how: Any = {"format": "v4l2"} if self.kind == "camera" else {"options": {"rtsp_transport": "tcp"}}
            return (Raw(frame) for frame, _ in video.frames(self.where, timeout=self.timeout, **how))
        if self.kind == "http":
            return (Raw(partial(open_frame, frame)) for frame in mjpeg(self.where, self.timeout))
        if self.kind == "stdin":
            return (Raw(partial(open_frame, frame)) for frame in _standard_input(int(self.where)))
        if self.kind == "watch":
            named = track_name if self.tracks == "name" else lambda _: ""
            found = watch(self.where, mark)
            return (Raw(partial(open_frame, path), m, None, named(path), str(path), m[0] / 1e9) for path, m in found)
        assert self.kind == "video"
        return self._recording(*(mark if isinstance(mark, list) else (0, mark or 0, 0.0)))  # one pass had a number

    def _recording(self, number: int, n_read: int, before: float) -> Iterator[Raw]:
        """The frames from a pass on, of which so many were read; before: the seconds of the passes before it."""
        while number < self.passes:
            last = period = 0.0
            for n, (frame, seconds) in enumerate(video.frames(self.where), 1):
                last, period = seconds, seconds - last
                if n > n_read:
                    yield Raw(frame, [number, n, before], before + seconds)
            number, n_read, before = number + 1, 0, before + last + period


CONNECTION_ERRORS = (OSError, HTTPException, VideoError, ValueError)
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.2, 4.0  # pause before a connection is tried again


def _standard_input(fd: int) -> Iterator[bytes]:
    splitter = JpegSplitter()
    while data := os.read(fd, 2**16):
        yield from splitter.feed(data)
    yield from splitter.rest()


CAMERAS = ("camera", "rtsp", "http")  # kinds that send frames by themselves, and may stop to
KINDS = {  # kind: its address
    "camera": "a device as in /dev/video0",
    "rtsp": "a URL",
    "http": "a URL",
    "stdin": "",
    "watch": "a directory",
    "video": "a file",
}


def make_feed(
    kind: str,
    where: str,
    size: int = 96,
    fps: float | None = None,
    every: int = 1,
    timeout: float = 10.0,
    retries: int | None = None,
    overload: str | None = None,
    tracks: str | None = None,
    passes: int | None = None,
    crop: str | None = None,
    fit: str = FIT,
    mask: str | None = None,
    regions: str | None = None,
    motion: str | None = None,
    between: str | None = None,
) -> Feed:
    """A feed with its options and, as far as possible, its address checked.

    overload: if the learner is too slow, `drop` the oldest waiting frames or let the source `wait`. Default: watch and
        video wait, the others drop.
    tracks: of watch alone: `name`, see `Feed`.
    passes: of video alone: how often it is read.
    crop, fit, mask: see `Sight`. regions: see `make_sights`.
    motion: `on`, `off` or a threshold, see `parse_motion`.
    """
    if fps is not None and not 0 < fps < 1e6:
        raise UserError(f"fps is {fps}: use a number above 0")
    if every < 1:
        raise UserError(f"every is {every}: use 1 (every frame) or more")
    if not 0 < timeout < 1e6:
        raise UserError(f"timeout is {timeout}: use a number of seconds above 0")
    if retries is not None and retries < 0:
        raise UserError(f"retries is {retries}: use 0 or more, or leave it out to try without limit")
    if overload not in (None, "drop", "wait"):
        raise UserError(f"overload is {overload!r}: use drop or wait")
    if tracks not in (None, "name"):
        raise UserError(f"tracks is {tracks!r}: use name, or leave it out")
    if tracks is not None and kind != "watch":
        raise UserError(f"tracks={tracks} is for watch: and folder:, whose frames have file names: leave it out")
    if passes is not None and kind != "video":
        raise UserError(f"passes={passes} is for recordings, {kind} has no end: leave it out")
    if passes is not None and passes < 1:
        raise UserError(f"passes is {passes}: use at least 1")
    if between is not None:
        Hours.parse(between)
        if kind == "video":
            raise UserError(
                f"between={between} is for cameras, and {where} is a recording, without a clock: leave it out"
            )
    sights = make_sights(crop, fit, mask, regions)
    if kind != "stdin" and not where:
        raise UserError(f"the source {kind!r} needs {KINDS[kind]}: write {kind}:…")
    if kind in ("rtsp", "http") and not urlsplit(where).hostname:
        raise UserError(f"{where!r} is no URL with the name of a camera: write {kind}://camera.local/…")
    if kind in ("camera", "video", "rtsp"):
        video.check_installed()
    path = Path(where).expanduser()
    if kind == "camera" and not path.exists():
        found = ", ".join(sorted(map(str, Path("/dev").glob("video*")))) or "none"
        raise UserError(f"no camera {where!r}: this machine has {found}")
    if kind == "watch" and not path.is_dir():
        raise UserError(f"no directory {where!r}: {near(path) or 'watch needs one that exists'}")
    if kind == "video":
        size_of_frames = video.frame_size(str(path))
        for sight in sights:
            sight.check(*size_of_frames)
    if kind in ("camera", "watch", "video"):
        where = str(path)
    if kind == "stdin":
        where = str(os.dup(0))  # the capture process has another standard input
    drops = kind not in ("watch", "video") if overload is None else overload == "drop"
    asked = timeout, retries, tracks, passes or 1, sights, parse_motion(motion), between
    return Feed(kind, where, checked_size(size), drops, fps, every, *asked)
