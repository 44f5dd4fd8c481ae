"""Run directories to one HTML page: tables, learning curves, scores, and the buffer with its pictures."""

import base64
import html
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from streamclr.directory import RunDirectory
from streamclr.errors import UserError
from streamclr.options import redacted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #8884; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
figure.plot { background: #fff; display: inline-block; margin: .5rem; border-radius: 6px }
figure.plot svg { max-width: 100%; height: auto }
.pictures { display: flex; flex-wrap: wrap; gap: 6px }
.pictures figure { margin: 0; text-align: center; font-size: 11px }
.pictures img { width: 64px; height: 64px; image-rendering: pixelated; display: block }
details { margin: 1rem 0 }
"""


def write_report(
    directories: Sequence[Path], out: Path, tables: Sequence["Table"] = (), title: str = "StreamCLR"
) -> Path:
    """One page on all the runs; `tables` come first."""
    title = redacted(title)  # it may be a source, with its password
    runs = [(path.name, RunDirectory.existing(path)) for path in directories]
    if not runs:
        raise UserError("no run to report on: give at least one run directory")
    parts = [f"<h1>{html.escape(title)}</h1>", *(table.html() for table in tables)]
    parts.append(results_table(runs).html())
    parts.append("<h2>Learning curves</h2>" + curves(runs))
    for name, run in runs:
        parts.append(f"<h2>{html.escape(name)}</h2>" + _run_section(run))
    page = f"<meta name=viewport content='width=device-width'><title>{html.escape(title)}</title><style>{STYLE}</style>"
    text = f"<!doctype html><html lang=en><meta charset=utf-8>{page}{''.join(parts)}</html>\n"
    out.write_text(text, encoding="utf-8", errors="replace")
    return out


class Table:
    """A table that is shown on a terminal, in Markdown and in HTML."""

    def __init__(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""):
        self.title, self.head, self.rows, self.note = title, head, rows, note

    def markdown(self) -> str:
        lines = [self.head, ["---"] + ["---:"] * (len(self.head) - 1), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.head)
        rows = "".join(
            f"<tr><td>{html.escape(row[0])}</td>"
            + "".join(f"<td class=number>{html.escape(c)}</td>" for c in row[1:])
            + "</tr>"
            for row in self.rows
        )
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        title = f"<h2>{html.escape(self.title)}</h2>" if self.title else ""
        return f"{title}<table><tr>{head}</tr>{rows}</table>{note}"

    def print(self) -> None:
        """A row on one line if there is room; else names, heads, then cells are broken between words; none is cut."""
        from rich.box import SIMPLE
        from rich.cells import cell_len
        from rich.console import Console, ConsoleDimensions
        from rich.markup import escape
        from rich.table import Table as RichTable

        columns = list(zip(self.head, *self.rows, strict=True))
        words = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in columns]
        cells = [max(n, *map(cell_len, column[1:]), 0) for n, column in zip(words, columns, strict=True)]
        whole = [max(map(cell_len, column)) for column in columns]
        console, between = Console(), 2 * len(columns)
        room = console.width - between if console.is_terminal else sum(whole)
        others = next((fit for fit in (whole, cells) if words[0] + sum(fit[1:]) <= room), words)[1:]
        widths = [min(whole[0], max(words[0], room - sum(others))), *others]
        console.size = ConsoleDimensions(max(console.width, sum(widths) + between), console.height)
        table = RichTable(box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
        table.title, table.title_justify = escape(self.title), "left"
        table.caption, table.caption_justify = escape(self.note), "left"
        for i, (head, width) in enumerate(zip(self.head, widths, strict=True)):
            table.add_column(escape(head), justify="right" if i else "left", width=width)
        for row in self.rows:
            table.add_row(*map(escape, row))
        console.print(table)
        console.print()


def labels_heading(fraction: str) -> str:
    return f"{100 * float(fraction):g} % labels"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def results_table(runs: Sequence[tuple[str, RunDirectory]]) -> Table:
    """A row per run, a column per label fraction."""
    results = [(name, run.results or {}) for name, run in runs]
    fractions = sorted({f for _, content in results for f in content.get("labels", {})}, key=float)
    head = ["run", *(labels_heading(f) for f in fractions), "linear probe", "kNN", "images", "seconds"]
    rows = []
    for name, content in results:
        labels = content.get("labels", {})
        cells = [percent(labels[f]["accuracy"]) if f in labels else "–" for f in fractions]
        cells += [percent(content.get("linear_probe")), percent(content.get("knn"))]
        cells += [f"{content[k]:,.0f}" if k in content else "–" for k in ("images", "seconds_learning")]
        rows.append([name, *cells])
    return Table("Accuracy on the test set", head, rows)


def curves(runs: Sequence[tuple[str, RunDirectory]]) -> str:
    """What changes as images come: loss, accuracy, replaced and re-scored share, mean score."""
    panels = {
        "loss": ("NT-Xent loss", lambda s: s["loss"]),
        "accuracy": ("kNN accuracy on the test set, %", lambda s: _times(100, s.get("accuracy"))),
        "replaced": ("images replaced, % of the buffer", lambda s: 100 * s["replaced"] / (s["kept"] + s["replaced"])),
        "rescored": ("buffer re-scored, %", lambda s: 100 * s["rescored"]),
        "score": ("mean score in the buffer", lambda s: s["score"]),
    }
    journals = [(name, run.steps()) for name, run in runs]
    drawn = []
    for title, value in panels.values():
        series = [(name, [(s["seen"], v) for s in steps if (v := value(s)) is not None]) for name, steps in journals]
        if any(points for _, points in series):
            drawn.append(line_plot(title, series))
    return "".join(drawn)


def line_plot(title: str, series: Sequence[tuple[str, Sequence[tuple[float, float]]]], path: Path | None = None) -> str:
    """One line per series, as SVG for a page, and into `path` if one is given."""

    def draw(axes: "Axes") -> None:
        for name, points in series:
            if points:
                x, y = np.array(points, dtype=float).T
                width = max(1, len(y) // 100)
                smooth = np.convolve(y, np.ones(width) / width, "valid")
                axes.plot(
                    x[width - 1 :],
                    smooth,
                    label=name.replace("$", r"\$"),
                    marker="o" if len(points) < 40 else None,
                    ms=3,
                    lw=1.5,
                )
        axes.set_xlabel("images seen")
        axes.grid(alpha=0.3)
        if sum(bool(points) for _, points in series) > 1:
            axes.legend(fontsize=8)

    return _plot(title, draw, [path] if path else [])


def _run_section(run: RunDirectory) -> str:
    config = run.config
    rows = [[key, str(value)] for key, value in vars(config).items() if value is not None]
    parts = [f"<details><summary>Configuration</summary>{Table('', ['option', 'value'], rows).html()}</details>"]
    parts.append(_per_class(run))
    parts.append(_class_mix(run))
    if (run.path / "buffer.safetensors").exists():
        parts.append(_buffer(run))
    return "".join(parts)


def _per_class(run: RunDirectory) -> str:
    labels = (run.results or {}).get("labels", {})
    if not labels:
        return ""
    names = list(next(iter(labels.values()))["per_class"])
    rows = [[name, *(percent(entry["per_class"][name]) for entry in labels.values())] for name in names]
    table = Table("", ["class", *(labels_heading(f) for f in labels)], rows)
    return f"<details><summary>Accuracy per class</summary>{table.html()}</details>"


def _class_mix(run: RunDirectory) -> str:
    steps = [step for step in run.steps() if "classes" in step]
    if not steps:
        return ""
    mix = np.array([step["classes"] for step in steps], dtype=float)
    names: list[str] = []
    if mix.shape[1] <= 10:  # more colours than that cannot be told apart
        for entry in (run.results or {}).get("labels", {}).values():
            names = [name.replace("$", r"\$") for name in entry["per_class"]]

    def draw(axes: "Axes") -> None:
        seen, shares = [step["seen"] for step in steps], 100 * (mix / mix.sum(1, keepdims=True)).T
        axes.stackplot(seen, shares, lw=0, labels=names)
        if names:
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
        axes.set_xlabel("images seen")
        axes.set_ylim(0, 100)
        axes.margins(x=0)

    return _plot("Classes in the buffer, % (labels serve this picture only)", draw)


def _buffer(run: RunDirectory) -> str:
    buffer = run.load_buffer()
    scores = buffer["scores"].numpy()
    scored = bool(np.isfinite(scores).all())
    order = np.argsort(-scores) if scored else np.argsort(-buffer["arrivals"].numpy())
    histogram = ""
    if scored:

        def draw(axes: "Axes") -> None:
            axes.hist(scores, bins=30)
            axes.set_xlabel("score")
            axes.set_ylabel("images")

        histogram = _plot("Scores in the final buffer", draw)
    pictures = []
    for i in order[:64]:
        caption = (f"{scores[i]:.3f} · " if scored else "") + f"age {int(buffer['ages'][i])}"
        pictures.append(f"<figure><img alt='' src='{_data_uri(buffer['images'][i].numpy())}'>{caption}</figure>")
    first = "highest score" if scored else "newest"
    heading = f"<h3>The final buffer: {len(pictures)} of {len(order)} images, {first} first</h3>"
    return f"{histogram}{heading}<div class=pictures>{''.join(pictures)}</div>"


def _data_uri(image: np.ndarray) -> str:
    data = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def save_plot(title: str, draw: Callable[["Axes"], None], path: Path) -> str:
    """Into path.png and path.svg."""
    return _plot(title, draw, [path.with_suffix(".png"), path.with_suffix(".svg")])


def _plot(title: str, draw: Callable[["Axes"], None], paths: Sequence[Path] = ()) -> str:
    from matplotlib import rc_context  # matplotlib is slow to import
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw(axes)
    axes.set_title(title, fontsize=10)
    data = io.StringIO()
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "streamclr"}):  # the same picture, the same file
        warnings.filterwarnings("ignore", "Glyph")  # a class name in a script that the font lacks
        for path in paths:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        figure.savefig(data, format="svg")
    return f"<figure class=plot>{data.getvalue()[data.getvalue().index('<svg') :]}</figure>"
