"""The events of a run in the words of somebody who has not read its documentation."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Plain(NamedTuple):
    kind: str  # classifier, tried (one that is not used), camera, trouble or note
    text: str


VERSION = r"version (\d+) \(step [\d,]+, (\d+) labels, (?:(\d+ of \d+) labels held back right|[^)]*)\)"


def plain(event: str, sources: Iterable[str] = ()) -> Plain:
    """sources: the names of the cameras, as events begin with them."""
    for name in sources:
        if event.startswith(f"{name}: "):
            what = event.removeprefix(f"{name}: ")
            return Plain("camera", f"{name}: {what}" if what == "frames again" else f"{name} sends no frames: {what}")
    for pattern, kind, text in PATTERNS:
        if found := re.fullmatch(pattern, event):
            return Plain(kind, text.format(*(group or "" for group in ("", *found.groups()))))
    return Plain("note", event)


PATTERNS = (
    (
        rf"{VERSION} is served; version (\d+) has (\d+) of \d+ of them right",
        "classifier",
        "A better classifier is in use: version {1}, from {2} labels. Of those held back {3} are right, before {5}.",
    ),
    (rf"{VERSION} is served", "classifier", "A classifier is in use: version {1}, from {2} labels."),
    (
        r"a new head of step ([\d,]+) is refused: (\d+ of \d+) labels held back right, version (\d+) has (\d+ of \d+)",
        "tried",
        "A new classifier was tried and is not better: it has {2} held-back labels right, version {3} has {4}.",
    ),
    (r"a new head of step ([\d,]+) is refused: (.*)", "tried", "A new classifier was tried and is not used: {2}."),
    (
        rf"rolled back: {VERSION} is served instead of version (\d+)",
        "classifier",
        "Somebody rolled back: version {1} is in use instead of version {4}, and stays until it is unpinned.",
    ),
    (r"no new head \((.*)\): .*", "trouble", "No new classifier could be trained ({1}); it is tried again."),
    (r"(no labels at hand|labels of fewer than two classes).*", "note", "Frames get no class until labels are given."),
    (
        r"collapse: all projections are alike.*",
        "trouble",
        "The encoder no longer tells frames apart (collapse): check what the camera shows, or lower --lr.",
    ),
    (r"step undone: (.*)", "trouble", "A step of learning was undone: {1}"),
    (r"(.*): back to step ([\d,]+)", "trouble", "Learning went back to step {2}: {1}"),
    (r"[\d,]+ frames = .* \+ ([\d,]+) rejected \((.*)\)", "trouble", "{1} frames could not be read so far: {2}."),
)
