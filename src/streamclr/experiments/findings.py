"""The results of an experiment: tables with the paper's numbers beside ours, and a plot."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from streamclr.base.statistics import mean_by, mean_interval, spread
from streamclr.base.table import Table
from streamclr.sweeps.job import Result
from streamclr.sweeps.lab import SCALES, Lab

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
POLICIES = ("contrast", "random", "fifo")  # those with a number for every setting in the paper


Draw = Callable[["Axes"], None]
Points = Sequence[tuple[float, float]]
Series = Sequence[tuple[str, Points, str]]  # the name, which may be empty, points, and matplotlib's format of a line
Setting = tuple[Sequence[Sequence[float]], Sequence[float], Sequence[str]]  # of `policies_table`
Accuracies = dict[str, dict[str, list[float]]]  # row: {"accuracy": one for each seed, in %}


@dataclass(frozen=True)
class Findings:
    """tables: the first is the paper's. measured: their numbers, seed by seed."""

    tables: list[Table]
    measured: dict[str, Any]
    title: str  # of the plot
    draw: Draw


def policies_of(lab: Lab, usual: Iterable[str] = NAMES) -> dict[str, str]:
    """The policies of a table and their names in it: the usual ones, and those of --policies."""
    return {policy: NAMES.get(policy, policy) for policy in dict.fromkeys([*usual, *lab.policies])}


def accuracy(results: Sequence[Result], fraction: str = ALL) -> list[float]:
    """Of the classifier trained on a fraction of the labels, in %, seed by seed."""
    return [100 * result["labels"][fraction]["accuracy"] for result in results]


def accuracies(results: Mapping[str, Sequence[Result]]) -> Accuracies:
    return {row: {"accuracy": accuracy(own)} for row, own in results.items()}


def curve(result: Result) -> Points:
    """Images seen and kNN accuracy in %."""
    return [(point["seen"], 100 * point["knn"]) for point in result["curve"]]


def mean_curve(results: Sequence[Result]) -> Points:
    """The mean over seeds."""
    return mean_by(point for result in results for point in curve(result))


# ----------------------------------------------------------------------------------------------------------------------
# Comparisons, seed by seed: the seeds are paired by their stream, and their spread is that of what a table shows


def margins(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Differences."""
    return [a - b for a, b in zip(ours, others, strict=True)]


def shares_of_gap(values: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[float]:
    """How much of the gap between low and high is closed, in %; nothing if the gap of a seed is below one point."""
    gaps = margins(high, low)
    return [] if min(gaps) < 1 else [100 * a / gap for a, gap in zip(margins(values, low), gaps, strict=True)]


def first_reached(points: Points, level: float) -> float | None:
    """Where a curve first reaches a level, interpolated between its points; None: never."""
    for (x_before, before), (x, y) in pairwise([points[0], *points]):
        if y >= level:
            return float(np.interp(level, (before, y), (x_before, x)))
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Cells and rows of tables


def against(ours: Sequence[float], paper: float | None) -> list[str]:
    """Three cells: ours, the paper's, the difference."""
    if paper is None:
        return [spread(ours), "–", "–"]
    return [spread(ours), f"{paper:.2f}", spread([value - paper for value in ours])]


def reached(where: Sequence[float | None], digits: int = 0) -> str:
    """A cell of `first_reached`: a mean if all seeds reach the level, else how many do."""
    found = [x for x in where if x is not None]
    if len(found) == len(where):
        return spread(found, digits)
    return f"{len(found)} of {len(where)} seeds" if found else "never"


def scale_note(lab: Lab) -> str:
    """Where a scale is far from the paper, for the end of the note of a table with margins."""
    own, paper = SCALES[lab.scale], SCALES["paper"]
    if own.lr == paper.lr or not own.lr or not paper.lr:
        return ""
    return (
        f" The margins are those of this scale: its learning rate is {own.lr / paper.lr:.0f} times the paper's "
        f"({own.lr:g} against {paper.lr:g} for a buffer of 256 images of CIFAR-10), its encoder has width {own.width} "
        f"instead of {paper.width}."
    )


def policies_table(
    title: str, names: Iterable[str], first: str, last: str, settings: Mapping[str, Setting], note: str = ""
) -> Table:
    """The accuracy of each policy in each setting beside the paper's, and the margin of contrast scoring, the first.

    names: of the policies, of which the paper has POLICIES.
    first, last: the headings of the outer columns.
    settings: our accuracies, the paper's and the last cell of each policy.
    """
    rows = []
    for setting, (ours, paper, cells) in settings.items():
        for name, own, theirs, cell in zip_longest(names, ours, paper, cells):
            of_paper = "–" if theirs is None else f"{paper[0] - theirs:.2f}"
            margin = [spread(margins(ours[0], own)), of_paper] if own is not ours[0] else ["–"] * 2
            rows.append([f"{setting}, {name}", *against(own, theirs), *margin, cell])
    head = [first, "accuracy, all labels, %", "paper", "difference", "contrast less this", "paper", last]
    return Table(title, head, rows, note)


def policies_by(
    columns: Mapping[int, str],
    measured: Accuracies,
    title: str,
    note: str,
    xlabel: str,
    log: int,
    unit: int = 1,
    names: Mapping[str, str] = NAMES,
) -> Findings:
    """The accuracy of every policy at each value of a setting, where `measured` has "policy value".

    The last row is a reservoir, the simplest rival, against contrast scoring.
    columns: heading by value.
    names: of the policies in the table.
    log: the base of the plot's axis, on which a value is `unit` times as large.
    """
    rows, series = [], []
    for policy, name in names.items():
        own = {n: measured.get(f"{policy} {n}", {"accuracy": []})["accuracy"] for n in columns}
        rows.append([name, *map(spread, own.values())])
        series.append((name, [(unit * n, mean(values)) for n, values in own.items() if values], "o-"))
    pairs = ((measured[f"{policy} {n}"]["accuracy"] for policy in ("reservoir", "contrast")) for n in columns)
    rows.append([f"{NAMES['reservoir']} less {NAMES['contrast']}", *(spread(margins(*pair)) for pair in pairs)])
    table = Table(title, ["", *columns.values()], rows, note)
    return Findings([table], measured, "Accuracy with all labels, %", lines(series, xlabel, log))


# ----------------------------------------------------------------------------------------------------------------------
# Plots


def lines(series: Series, xlabel: str, log: int | None = None, fontsize: int = 7, **style: Any) -> Draw:
    """Lines with a legend of those that have a name; log: the base of a logarithmic axis [linear]."""

    def draw(axes: "Axes") -> None:
        for name, points, form in series:
            axes.plot(*zip(*points, strict=True), form, label=name, **style)
        if log:
            axes.set_xscale("log", base=log)
        axes.set_xlabel(xlabel)
        axes.legend(fontsize=fontsize)

    return draw


def bars(groups: Mapping[str, Sequence[Sequence[float]]], names: Sequence[str] = (), **ticks: Any) -> Draw:
    """Groups of two bars, each the mean of its values, which are dots; names: of the bars, for a legend."""

    def draw(axes: "Axes") -> None:
        for i in range(2):
            for x, group in enumerate(groups.values()):
                axes.bar(x + 0.4 * i, mean(group[i]), 0.38, color=f"C{i}", label=names[i] if names and not x else None)
                axes.plot([x + 0.4 * i] * len(group[i]), group[i], "k.", ms=3)
        axes.set_xticks([x + 0.2 for x in range(len(groups))], list(groups), **ticks)
        axes.set_ylabel("%")
        if names:
            axes.legend(fontsize=8)

    return draw


def error_bars(groups: Mapping[str, Sequence[float]], xlabel: str) -> Draw:
    """Means of groups with their 95 % intervals, connected."""

    def draw(axes: "Axes") -> None:
        means, halves = zip(*map(mean_interval, groups.values()), strict=True)
        axes.errorbar(range(len(groups)), means, halves, marker="o")
        axes.set_xticks(range(len(groups)), list(groups))
        axes.set_xlabel(xlabel)

    return draw
