"""One HTML page about runs: tables, learning curves, scores, and the images of the buffer."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamclr.base.errors import UserError
from streamclr.base.options import redacted
from streamclr.base.plots import line_plot, plot
from streamclr.base.table import Table, labels_heading, percent
from streamclr.labelling.candidates import png
from streamclr.records.directory import RunDirectory
from streamclr.runs.next_step import next_step
from streamclr.stage_two import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

START = "<!doctype html><html lang=en><meta charset=utf-8>"
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


def write_report(paths: Sequence[Path], out: Path, tables: Sequence[Table] = (), title: str = "StreamCLR") -> Path:
    """Write one page about all the runs; `tables` come first."""
    title = redacted(title)  # it may be a source with a password
    runs = [(path.name, RunDirectory.existing(path)) for path in paths]
    if not runs:
        raise UserError("no run to report on: give at least one run directory")
    parts = [f"<h1>{html.escape(title)}</h1>", *(table.html() for table in [*tables, results_table(runs)])]
    parts.append("<h2>Learning curves</h2>" + curves(runs))
    parts += [f"<h2>{html.escape(name)}</h2>" + _run_section(run) for name, run in runs]
    page = f"<meta name=viewport content='width=device-width'><title>{html.escape(title)}</title><style>{STYLE}</style>"
    text = f"{START}{page}{''.join(parts)}</html>\n"
    out.write_text(text, encoding="utf-8", errors="replace")
    return out


def is_report(path: Path) -> bool:
    """Whether a file is a page that `write_report` wrote, and so may be written anew."""
    with path.open("rb") as file:
        return file.read(len(START)) == START.encode()


def results_table(runs: Sequence[tuple[str, RunDirectory]]) -> Table:
    """A row per run, a column per label fraction; no column that would be empty, as of a stream without labels."""
    results = [(name, run.results or {}) for name, run in runs]
    fractions = sorted({f for _, content in results for f in content.get("labels", {})}, key=float)
    probes = {"linear_probe": "linear probe", "knn": "kNN"}
    probes = {key: name for key, name in probes.items() if any(content.get(key) is not None for _, content in results)}
    head = ["run", *(labels_heading(f) for f in fractions), *probes.values(), "images", "seconds"]
    rows = []
    for name, content in results:
        labels = content.get("labels", {})
        cells = [_accuracy(labels[f]) if f in labels else "–" for f in fractions]
        cells += [percent(content.get(key)) for key in probes]
        cells += [f"{content[k]:,.0f}" if k in content else "–" for k in ("images", "seconds_learning")]
        rows.append([name, *cells])
    return Table("Accuracy on the test set" if fractions or probes else "Runs", head, rows)


def _accuracy(entry: dict[str, Any]) -> str:
    """With the kind of classifier, of a run that could choose."""
    return " ".join(filter(None, (percent(entry["accuracy"]), KINDS.get(entry.get("classifier", "")))))


def curves(runs: Sequence[tuple[str, RunDirectory]]) -> str:
    """Curves over images seen: loss, accuracy, replaced and re-scored share, mean score."""
    panels = (
        ("NT-Xent loss", lambda s: s["loss"]),
        ("kNN accuracy on the test set, %", lambda s: 100 * s["accuracy"] if s.get("accuracy") is not None else None),
        ("images replaced, % of the buffer", lambda s: 100 * s["replaced"] / (s["kept"] + s["replaced"])),
        ("buffer re-scored, %", lambda s: 100 * s["rescored"]),
        ("mean score in the buffer", lambda s: s["score"]),
    )
    journals = [(name, run.steps()) for name, run in runs]
    drawn = []
    for title, value in panels:
        series = [(name, [(s["seen"], v) for s in steps if (v := value(s)) is not None]) for name, steps in journals]
        if any(points for _, points in series):
            drawn.append(line_plot(title, series))
    return "".join(drawn)


def _run_section(run: RunDirectory) -> str:
    rows = [[key, str(value)] for key, value in vars(run.config).items() if value is not None]
    options = f"<details><summary>Configuration</summary>{Table('', ['option', 'value'], rows).html()}</details>"
    buffer = _buffer(run) if (run.path / "buffer.safetensors").exists() else ""
    then = next_step(run)
    next_ = f"<p>Next: <code>{html.escape(redacted(then))}</code></p>" if then else ""
    return next_ + options + _per_class(run) + _class_mix(run) + buffer


def _per_class(run: RunDirectory) -> str:
    labels = (run.results or {}).get("labels", {})
    if not labels:
        return ""
    names = list(next(iter(labels.values()))["per_class"])
    rows = [[name, *(percent(entry["per_class"][name]) for entry in labels.values())] for name in names]
    table = Table("", ["class", *(labels_heading(f) for f in labels)], rows)
    reasons = [f"{labels_heading(f)}: {entry['why']}" for f, entry in labels.items() if "why" in entry]
    why = "".join(f"<li>{html.escape(reason)}</li>" for reason in reasons)
    chosen = f"<p>Which classifier, and why:</p><ul>{why}</ul>" if why else ""
    return f"{chosen}<details><summary>Accuracy per class</summary>{table.html()}</details>"


def _class_mix(run: RunDirectory) -> str:
    steps = [step for step in run.steps() if "classes" in step]
    if not steps:
        return ""
    mix = np.array([step["classes"] for step in steps], dtype=float)
    names: list[str] = []
    if mix.shape[1] <= 10:  # more colours cannot be told apart
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

    return plot("Classes in the buffer, % (labels are used for this plot only)", draw)


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

        histogram = plot("Scores in the final buffer", draw)
    pictures = []
    for i in order[:64]:
        caption = (f"{scores[i]:.3f} · " if scored else "") + f"age {int(buffer['ages'][i])}"
        picture = base64.b64encode(png(buffer["images"][i])).decode()
        pictures.append(f"<figure><img alt='' src='data:image/png;base64,{picture}'>{caption}</figure>")
    first = "highest score" if scored else "newest"
    heading = f"<h3>The final buffer: {len(pictures)} of {len(order)} images, {first} first</h3>"
    return f"{histogram}{heading}<div class=pictures>{''.join(pictures)}</div>"
