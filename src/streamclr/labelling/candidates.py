"""The images that a person may be asked about: a uniform draw of the stream so far, in a file that never grows."""

import hashlib
import io
import json
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.options import parse_size
from streamclr.base.statistics import uniform
from streamclr.guards import unusable
from streamclr.records.label_budget import (
    DIGEST_SIZE,
    HEADER_SIZE,
    THUMBNAIL_BYTES,
    LabelBudget,
    clips_that_fit,
    record_size,
)
from streamclr.records.plan import RunPlan
from streamclr.streams.sight import THUMBNAIL_SIDE

ThumbnailOf = Callable[[int], bytes | None]
UNKNOWN = -1  # track of a frame of which nothing is known


class Candidates:
    """A reservoir of clips, which are consecutive frames: each clip of the stream is in it with the same probability,
    however long the stream is.

    Which place a frame takes depends on its number alone, so that there is no state to keep: offered again after a
    restart it goes where it went before.

    clip: frames in a clip. A file of version 0.1 has single frames without their tracks, and goes on so.
    thumbnail: bytes for the thumbnail of a clip, which is of one of its frames; 0: there are none. A file that was made
        without them goes on so.
    """

    def __init__(
        self, path: Path, n_clips: int, shape: tuple[int, ...], seed: int = 0, clip: int = 1, thumbnail: int = 0
    ):
        self.path, self.shape, self.seed = path, shape, seed
        self.n_clips, self.clip, self.thumbnail = n_clips, clip, thumbnail
        self._record_size = record_size(shape)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        content = os.pread(self._file, HEADER_SIZE, 0)
        about: dict[str, Any] = {"candidates": n_clips * clip, "shape": list(shape), "seed": seed, "clip": clip}
        about |= {"thumbnail": thumbnail} if thumbnail else {}
        self._has_tracks = True
        with suppress(ValueError, AttributeError, TypeError, LookupError):  # no JSON, no object, or damaged
            known = json.loads(content)
            if (
                known.items() >= {"shape": list(shape), "seed": seed}.items()
                and "thumbnail" not in known
                and (thumbnail or "clip" not in known)
            ):
                self.clip, self._has_tracks = known.get("clip", 1), "clip" in known
                self.n_clips, self.thumbnail, about = known["candidates"] // self.clip, 0, known
        self._clip_size = self.clip * self._record_size + self.thumbnail
        header = json.dumps(about).encode().ljust(HEADER_SIZE - 1) + b"\n"
        if content != header:
            os.truncate(self._file, 0)
            os.pwrite(self._file, header, 0)
        try:  # all of it now, so that a disk that fills up later does no harm
            os.posix_fallocate(self._file, 0, HEADER_SIZE + self.n_clips * self._clip_size)
        except OSError as error:
            os.close(self._file)
            room = f"no room for {self.n_clips * self.clip} candidates of the label queue in {path.parent}"
            raise UserError(f"{room} ({error.strerror}): use a smaller --label-disk") from None

    @property
    def thumbnail_every(self) -> int:
        """Of a camera every Nth frame needs a thumbnail, so that each clip has one near its middle; 0: none does."""
        return max(1, self.clip // 2) if self.thumbnail else 0

    def offer(
        self, images: Tensor, first: int, tracks: Tensor | None = None, thumbnail_of: ThumbnailOf = lambda number: None
    ) -> None:
        """The next images of the stream; `first` is the number of the first of them.

        tracks: int64, see `Candidate`; None: not known.
        thumbnail_of: from the number of one of them to its JPEG for people, if it has one.
        """
        end = first + len(images)
        clips = np.arange(first // self.clip, -(-end // self.clip))
        for clip, where in zip(clips.tolist(), place(clips, self.n_clips, self.seed).tolist(), strict=True):
            if where >= self.n_clips:
                continue
            start = HEADER_SIZE + where * self._clip_size
            numbers = range(max(first, clip * self.clip), min(end, (clip + 1) * self.clip))
            for number in numbers:
                track = UNKNOWN if tracks is None else int(tracks[number - first])
                pixels = images[number - first].cpu().numpy().tobytes()
                content = struct.pack("<qd", number + 1, time.time()) + pixels
                if self._has_tracks:
                    content = struct.pack("<q", track) + content
                digest = _digest(content, self._record_size - len(content))  # 8 bytes beside a track, else 16
                os.pwrite(self._file, digest + content, start + number % self.clip * self._record_size)
            if self.thumbnail:
                self._offer_thumbnail(numbers, start + self.clip * self._record_size, thumbnail_of)

    def _offer_thumbnail(self, numbers: range, start: int, thumbnail_of: ThumbnailOf) -> None:
        """Keep the thumbnail of that frame of the clip which is nearest to its middle, of those that have one."""
        middle = numbers[0] // self.clip * self.clip + self.clip // 2
        known = read_thumbnail(os.pread(self._file, self.thumbnail, start))
        distance = self.clip
        if known is not None and known[0] // self.clip == numbers[0] // self.clip:  # of an earlier segment
            distance = abs(known[0] - middle)
        for number in sorted(numbers, key=lambda number: abs(number - middle)):
            if abs(number - middle) >= distance:
                break
            if (content := thumbnail_of(number)) and (content := small_enough(content, self.thumbnail - 28)):
                record = struct.pack("<qi", number + 1, len(content)) + content
                os.pwrite(self._file, _digest(record, DIGEST_SIZE) + record, start)
                break

    def close(self) -> None:
        os.close(self._file)


def open_candidates(
    path: Path, plan: RunPlan, epoch: int | None = None, has_thumbnails: bool = False
) -> Candidates | None:
    """The candidates of a run in its directory; None if nobody is to be asked.

    epoch: images of one pass of the stream, if it has passes.
    has_thumbnails: whether the stream has them.
    """
    if plan.label_budget is None:
        return None
    n_frames = min((n for n in (plan.images, epoch) if n is not None), default=None)
    n_asked = LabelBudget.parse(plan.label_budget).images
    each = THUMBNAIL_BYTES if has_thumbnails and plan.size < THUMBNAIL_SIDE else 0
    n_clips, clip, each = clips_that_fit(parse_size(plan.label_disk), plan.size, n_frames, n_asked, each)
    return Candidates(path / "candidates.bin", n_clips, (3, plan.size, plan.size), plan.seed, clip, each)


class Candidate(NamedTuple):
    key: str  # of its pixels: the same image has the same
    arrival: int  # number in the stream
    time: float
    image: Tensor  # 3 x H x W, uint8
    # From 0 on: frames with the same number show the same object. Below: those with different numbers are apart, by a
    # cut or by their camera; those with the same may be the same scene.
    track: int = UNKNOWN
    thumbnail: bytes | None = None  # a JPEG for people


def read_candidates(path: Path) -> list[Candidate]:
    """One frame of each clip, in the order of the stream: the one to ask about."""
    return [middle(clip) for clip in read_clips(path)]


def middle(clip: list[Candidate]) -> Candidate:
    """The frame of a clip to ask about: the others are nearest to it. One that a person can recognise, if there is."""
    return next((frame for frame in clip if frame.thumbnail), clip[len(clip) // 2])


def read_clips(path: Path) -> list[list[Candidate]]:
    """The frames that are complete, clip by clip, in the order of the stream, each image once; a run may be writing
    others meanwhile."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(HEADER_SIZE))
            shape, n_frames, clip = tuple(header["shape"]), header["candidates"], header.get("clip", 1)
            thumbnail = header.get("thumbnail", 0)
            frames: list[Candidate] = []
            for _ in range(n_frames // clip):
                own = [_frame(file.read(record_size(shape)), shape, "clip" in header) for _ in range(clip)]
                arrival, content = read_thumbnail(file.read(thumbnail)) or (None, None)
                known = [
                    frame._replace(thumbnail=content) if frame.arrival == arrival else frame
                    for frame in own
                    if frame is not None
                ]
                # A newer clip takes the place frame by frame: what is left of the older one is no part of it.
                newest = max((frame.arrival // clip for frame in known), default=0)
                frames += [frame for frame in known if frame.arrival // clip == newest]
    except OSError as error:
        raise UserError(f"no label queue: {path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} holds no candidates of a label queue") from None
    frames.sort(key=lambda frame: -frame.arrival)
    first = {frame.key: frame for frame in frames}  # of the same images
    clips: dict[int, list[Candidate]] = {}
    for frame in reversed(first.values()):
        clips.setdefault(frame.arrival // clip, []).append(frame)
    return [clips[number] for number in sorted(clips)]


def _frame(record: bytes, shape: tuple[int, ...], has_track: bool) -> Candidate | None:
    """None for a record that is empty, or cut short by a power failure."""
    digest_size = DIGEST_SIZE - 8 if has_track else DIGEST_SIZE
    content = record[digest_size:]
    if len(record) < record_size(shape) or _digest(content, digest_size) != record[:digest_size]:
        return None
    track = UNKNOWN
    if has_track:
        (track,), content = struct.unpack_from("<q", content), content[8:]
    number, when = struct.unpack_from("<qd", content)
    image = torch.frombuffer(bytearray(content[16:]), dtype=torch.uint8).view(shape)
    return Candidate(key_of(image), number - 1, when, image, track)


def read_thumbnail(record: bytes) -> tuple[int, bytes] | None:
    """The number of the frame, and its JPEG; None if there is none, or the record was cut short."""
    if len(record) < 28:
        return None
    number, n_bytes = struct.unpack_from("<qi", record, DIGEST_SIZE)
    content = record[DIGEST_SIZE : 28 + max(0, n_bytes)]
    return (number - 1, content[12:]) if _digest(content, DIGEST_SIZE) == record[:DIGEST_SIZE] else None


def small_enough(thumbnail: bytes, n_bytes: int) -> bytes | None:
    """The JPEG, smaller and plainer if it has more bytes than that."""
    image = None
    for side, quality in ((256, 60), (256, 40), (192, 40), (128, 40)):
        if len(thumbnail) <= n_bytes:
            return thumbnail
        image = image or Image.open(io.BytesIO(thumbnail))
        smaller, content = image.copy(), io.BytesIO()
        smaller.thumbnail((side, side))
        smaller.save(content, "JPEG", quality=quality)
        thumbnail = content.getvalue()
    return thumbnail if len(thumbnail) <= n_bytes else None


def key_of(image: Tensor) -> str:
    """The key of an image, by its pixels."""
    return _digest(image.numpy().tobytes(), DIGEST_SIZE).hex()


def place(numbers: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    """Where each clip goes by its number in the stream; the capacity or above is nowhere (Vitter's algorithm R)."""
    drawn = np.minimum((uniform(numbers, seed) * (numbers + 1)).astype(np.int64), numbers)
    return np.where(numbers < capacity, numbers, drawn)


def _digest(content: bytes, size: int) -> bytes:
    return hashlib.blake2b(content, digest_size=size).digest()


def usable(clips: list[list[Candidate]]) -> list[list[Candidate]]:
    """Without frames that are black, noise or smears; a clip may end up without any."""
    bad = unusable(torch.stack([frame.image for clip in clips for frame in clip])).tolist()
    is_bad = iter(bad)
    kept = [[frame for frame in clip if not next(is_bad)] for clip in clips]
    return [clip for clip in kept if clip]


def png(image: Tensor) -> bytes:
    data = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(data, "PNG")
    return data.getvalue()


def pixels(picture: bytes) -> Tensor:
    """The image of a PNG, 3 x H x W."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(picture)).convert("RGB"))).permute(2, 0, 1).contiguous()
