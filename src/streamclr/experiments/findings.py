"""The results of an experiment: tables with the paper's numbers beside ours, and a plot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

from streamclr.base.statistics import spread
from streamclr.base.table import Table
from streamclr.sweeps.job import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALL = "1.0"  # the label fraction of all labels
NAMES = {
    "contrast": "Contrast Scoring",
    "random": "Random Replace",
    "fifo": "FIFO Replace",
    "selective-bp": "Selective-BP",
    "k-center": "K-Center",
    "reservoir": "Reservoir",
}


@dataclass(frozen=True)
class Findings:
    """tables: the first is the paper's. measured: their numbers, seed by seed."""

    tables: list[Table]
    measured: dict[str, Any]
    title: str  # of the plot
    draw: Callable[["Axes"], None] = field(repr=False)


def accuracy(results: Sequence[Result], fraction: str = ALL) -> list[float]:
    """Of the classifier trained on a fraction of the labels, in %, seed by seed."""
    return [100 * result["labels"][fraction]["accuracy"] for result in results]


def signed(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:+.{digits}f}"


def against(ours: Sequence[float], paper: float | None) -> list[str]:
    """Three cells: ours, the paper's, the difference."""
    if paper is None or not ours:
        return [spread(ours), "–" if paper is None else f"{paper:.2f}", "–"]
    return [spread(ours), f"{paper:.2f}", signed(mean(ours) - paper)]


def mean_curve(results: Sequence[Result], key: str = "knn") -> list[tuple[float, float]]:
    """Images seen and kNN accuracy in %, mean over seeds."""
    points: dict[int, list[float]] = {}
    for result in results:
        for point in result["curve"]:
            points.setdefault(point["seen"], []).append(100 * point[key])
    return [(seen, mean(values)) for seen, values in sorted(points.items())]


def images_to_reach(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """The number of images at which a curve first reaches a level, interpolated between its points."""
    before: tuple[float, float] | None = None
    for seen, value in curve:
        if value >= level:
            if before is None:
                return seen
            share = (level - before[1]) / (value - before[1])
            return before[0] + share * (seen - before[0])
        before = (seen, value)
    return None
