"""Plots as SVG for a page and as files."""

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def line_plot(title: str, series: Sequence[tuple[str, Sequence[tuple[float, float]]]], path: Path | None = None) -> str:
    """One line per series; returns SVG for a page, and writes `path` if it is given."""

    def draw(axes: "Axes") -> None:
        for name, points in series:
            if points:
                x, y = np.array(points, dtype=float).T
                width = max(1, len(y) // 100)
                smooth = np.convolve(y, np.ones(width) / width, "valid")
                label, marker = name.replace("$", r"\$"), "o" if len(points) < 40 else None
                line = "-" if len(points) > 2 else "none"  # two points are no curve
                axes.plot(x[width - 1 :], smooth, ls=line, label=label, marker=marker, ms=3, lw=1.5)
        axes.set_xlabel("images seen")
        axes.grid(alpha=0.3)
        if sum(bool(points) for _, points in series) > 1:
            axes.legend(fontsize=8)

    return plot(title, draw, [path] if path else [])


def save_plot(title: str, draw: Callable[["Axes"], None], path: Path) -> str:
    """Write path.png and path.svg."""
    return plot(title, draw, [path.with_suffix(".png"), path.with_suffix(".svg")])


def plot(title: str, draw: Callable[["Axes"], None], paths: Sequence[Path] = ()) -> str:
    """Returns SVG for a page, and writes the paths."""
    from matplotlib import rc_context  # here, because matplotlib is slow to import
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw(axes)
    axes.set_title(title, fontsize=10)
    data = io.StringIO()
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "streamclr"}):  # the same plot gives the same file
        warnings.filterwarnings("ignore", "Glyph")  # a class name with letters that the font lacks
        for path in paths:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        figure.savefig(data, format="svg")
    return f"<figure class=plot>{data.getvalue()[data.getvalue().index('<svg') :]}</figure>"
