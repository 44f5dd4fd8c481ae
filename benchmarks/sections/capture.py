"""From a recording to small images."""

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from streamclr import open_stream

from .measure import Cost, Ratio, Spread, calling, in_turns
from .report import row
from .subjects import clips_in

FPS = 30  # of a usual camera
N_PASSES = 3
Reader = Callable[[Path, int, int], int]  # reads a clip so often, scaled to a side; returns the number of frames


def capture(size: int = 96, turns: int = 4, clip: Path | None = None) -> None:
    """Our capture, decoding and scaling of a 720p clip, of the same in a plain loop of PyAV or OpenCV.

    As `run` reads it: in a process of its own, checked, in the order of the stream. What starting it takes is left out:
    each reads the clip once and three times, and the difference counts.
    """
    readers: dict[str, Reader] = {"ours": ours, "PyAV": pyav}
    if find_spec("cv2"):
        readers["OpenCV"] = opencv
    else:
        row("our capture, of a plain OpenCV loop", "skipped: no OpenCV", "make bench-peers")
    with tempfile.TemporaryDirectory() as place:
        clip = clip or clips_in(Path(place))[0]
        n_frames = pyav(clip, 1, size)
        cases = {(name, n): calling(read, clip, n, size) for name, read in readers.items() for n in (1, N_PASSES)}
        costs = in_turns(cases, turns)
    found = {name: list(map(less, costs[name, N_PASSES], costs[name, 1])) for name in readers}
    for name in list(readers)[1:]:
        row(f"our capture, of a plain {name} loop (720p to {size} px)", Ratio.of(found["ours"], found[name]))
    for name, spent in found.items():
        share = Spread.of([100 * FPS * cost.cpu / (N_PASSES - 1) / n_frames for cost in spent])
        row(f"{name}: CPU time for {FPS} frames a second", f"{share} % of a core")


def less(longer: Cost, shorter: Cost) -> Cost:
    return Cost(longer.wall - shorter.wall, longer.cpu - shorter.cpu)


def ours(clip: Path, n: int, size: int) -> int:
    return sum(len(images) for images in open_stream(clip, size=size, passes=n).segments(64))


def pyav(clip: Path, n: int, size: int) -> int:
    import av

    n_frames = 0
    for _ in range(n):
        with av.open(str(clip)) as container:
            for frame in container.decode(video=0):
                frame.to_ndarray(width=size, height=size, format="rgb24")
                n_frames += 1
    return n_frames


def opencv(clip: Path, n: int, size: int) -> int:
    import cv2

    n_frames = 0
    for _ in range(n):
        video = cv2.VideoCapture(str(clip))
        while (found := video.read())[0]:
            cv2.cvtColor(cv2.resize(found[1], (size, size), interpolation=cv2.INTER_AREA), cv2.COLOR_BGR2RGB)
            n_frames += 1
        video.release()
    return n_frames
