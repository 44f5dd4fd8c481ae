"""The results of an experiment: tables with the paper's numbers beside ours, and a plot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

from streamclr.base.statistics import mean_by, mean_interval, spread
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


def accuracy(results: Sequence[Result], fraction: str = ALL) -> list[float]:
    """Of the classifier trained on a fraction of the labels, in %, seed by seed."""
    return [100 * result["labels"][fraction]["accuracy"] for result in results]


def accuracies(results: Mapping[str, Sequence[Result]]) -> Accuracies:
    return {row: {"accuracy": accuracy(own)} for row, own in results.items()}


def mean_curve(results: Sequence[Result]) -> Points:
    """Images seen and kNN accuracy in %, mean over seeds."""
    return mean_by((point["seen"], 100 * point["knn"]) for result in results for point in result["curve"])


# ----------------------------------------------------------------------------------------------------------------------
# Cells and rows of tables


def signed(value: float, digits: int = 1) -> str:
    return f"{value:+.{digits}f}"


def against(ours: Sequence[float], paper: float) -> list[str]:
    """Three cells: ours, the paper's, the difference."""
    return [spread(ours), f"{paper:.2f}", signed(mean(ours) - paper)]


def margins(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Differences of values that are paired by their seed, and so by their stream."""
    return [a - b for a, b in zip(ours, others, strict=True)]


def share_of_gap(value: Sequence[float], low: Sequence[float], high: Sequence[float]) -> str:
    """How much of the gap between the means of low and high is closed; no number if the gap is below one point."""
    gap = mean(high) - mean(low)
    return "–" if gap < 1 else f"{100 * (mean(value) - mean(low)) / gap:.0f} %"


def policies_table(title: str, first: str, last: str, settings: Mapping[str, Setting], note: str = "") -> Table:
    """The accuracy of each of POLICIES in each setting beside the paper's, and the margin of contrast scoring.

    first, last: the headings of the outer columns.
    settings: our accuracies, the paper's and the last cell of each of POLICIES.
    """
    rows = []
    for setting, (ours, paper, cells) in settings.items():
        for policy, own, theirs, cell in zip(POLICIES, ours, paper, cells, strict=True):
            margin = [spread(margins(ours[0], own)), f"{paper[0] - theirs:.2f}"] if policy != "contrast" else ["–"] * 2
            rows.append([f"{setting}, {NAMES[policy]}", *against(own, theirs), *margin, cell])
    head = [first, "accuracy, all labels, %", "paper", "difference", "contrast less this", "paper", last]
    return Table(title, head, rows, note)


def policies_by(
    columns: Mapping[int, str], measured: Accuracies, title: str, note: str, xlabel: str, log: int, unit: int = 1
) -> Findings:
    """The accuracy of every policy at each value of a setting, where `measured` has "policy value".

    columns: heading by value.
    log: the base of the plot's axis, on which a value is `unit` times as large.
    """
    rows, series = [], []
    for policy, name in NAMES.items():
        own = {n: measured.get(f"{policy} {n}", {"accuracy": []})["accuracy"] for n in columns}
        rows.append([name, *map(spread, own.values())])
        series.append((name, [(unit * n, mean(values)) for n, values in own.items() if values], "o-"))
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
