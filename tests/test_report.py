import dataclasses
import html.parser

import pytest

from streamclr import UserError
from streamclr.base.plots import line_plot
from streamclr.base.table import Table
from streamclr.cli.entry import main
from streamclr.records.directory import RunDirectory
from streamclr.runs.report import results_table, write_report
from streamclr.runs.run import run
from support.runs import small_options


class Reader(html.parser.HTMLParser):
    """Counts tags, and finds what a page would fetch from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.outside = {}, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.outside += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith(("data:", "#"))]


@pytest.fixture
def config(tmp_path):
    return small_options(tmp_path)


def test_the_page_shows_curves_scores_pictures_and_classes(config, tmp_path):
    path, _ = run(config)
    page = write_report([path], tmp_path / "report.html", title="A <title>").read_text()
    reader = Reader(page)
    assert reader.tags["img"] == 8  # the whole buffer
    assert reader.tags["svg"] == 7  # five curves, the class mix, the scores
    for text in (
        "A &lt;title&gt;",
        "NT-Xent loss",
        "kNN accuracy",
        "Scores in the final buffer",
        "Classes in the buffer",
    ):
        assert text in page
    assert "10 % labels" in page
    assert " % linear</td>" in page
    assert "<li>10 % labels: linear: as asked</li>" in page
    assert not reader.outside


def test_a_policy_without_scores_and_several_runs(config, tmp_path):
    paths = [
        run(dataclasses.replace(config, policy=p, out=str(tmp_path / p), probes=0, fractions="1"))[0]
        for p in ("fifo", "random")
    ]
    page = write_report(paths, tmp_path / "report.html").read_text()
    assert "Scores in the final buffer" not in page
    assert "mean score" not in page
    assert page.count("newest first") == 2


def test_names_that_mean_something_to_a_formatter(config, tmp_path, capsys):
    for name, strange in (("ant", "$a_{$"), ("bee", "[red]蜂")):
        (tmp_path / "images" / name).rename(tmp_path / "images" / strange)
    path, _ = run(dataclasses.replace(config, out=str(tmp_path / "[red]$x_{$")))
    page = write_report([path, path], tmp_path / "report.html").read_text("utf-8")
    assert "$a_{$" in page
    results_table([(path.name, RunDirectory(path))]).print()
    assert "[red]$x_{$" in capsys.readouterr().out


def test_a_run_without_labels_has_no_empty_column_and_no_line_through_two_points(config, tmp_path, capsys):
    unlabelled = dataclasses.replace(config, source=f"folder:{tmp_path / 'images' / 'ant'}", stc=None, images=16)
    path, results = run(unlabelled)
    assert results["steps"] == 2
    page = write_report([path], tmp_path / "report.html").read_text()
    assert "Accuracy" not in page
    assert "linear probe" not in page
    assert "NT-Xent loss" in page
    assert f"Next: <code>streamclr label {path} (about 2 minutes)</code>" in page
    table = results_table([(path.name, RunDirectory(path))])
    assert (table.title, table.head) == ("Runs", ["run", "images", "seconds"])
    drawn = {n: line_plot("", [("", [(i, i) for i in range(n)])]) for n in (2, 3)}
    assert ["stroke: #1f77b4; stroke-width: 1.5" in drawn[n] for n in (2, 3)] == [False, True]
    assert main(["report", str(path), "--out", str(tmp_path / "report.html")]) == 0  # a report may be written anew
    (tmp_path / "notes.html").write_text("<html>my notes</html>")
    capsys.readouterr()
    assert main(["report", str(path), "--out", str(tmp_path / "notes.html")]) == 2
    assert "notes.html exists already and is no report: give another --out" in capsys.readouterr().err
    assert (tmp_path / "notes.html").read_text() == "<html>my notes</html>"
    assert main(["report", str(path), "--out", str(tmp_path)]) == 2
    assert "is a directory: give a file, as --out" in capsys.readouterr().err


def test_nothing_to_report(tmp_path):
    with pytest.raises(UserError, match="no run"):
        write_report([], tmp_path / "report.html")


def test_table_in_markdown_and_html(capsys):
    table = Table("Title", ["", "a"], [["x & y", "1 %"]], "a note")
    assert table.markdown() == "|  | a |\n| --- | ---: |\n| x & y | 1 % |\n"
    assert "<td>x &amp; y</td><td class=number>1 %</td>" in table.html()
    table.print()
    assert "a note" in capsys.readouterr().out


@pytest.mark.parametrize("width", [20, 60, 200])
def test_no_word_of_a_table_is_cut_on_any_terminal(width, capsys, monkeypatch):
    for name, value in {"COLUMNS": str(width), "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    rows = [["supervised, head on an untrained encoder", "20.4 ± 0.7", "-11.7"], ["K-Center", "35.8 ± 1.4", "–"]]
    table = Table("Title", ["", "1 % labels", "the difference from the paper"], rows, "a note")
    table.print()
    shown = capsys.readouterr().out
    for row in (table.head, *rows):
        assert all(word in shown for cell in row for word in cell.split())
    whole = [cell for row in rows for cell in row if cell in shown]
    assert (len(whole) == 6) == (width == 200)  # broken between words only where there is no room


def test_a_table_in_a_file_has_a_row_on_one_line(capsys):
    rows = [["a name " * 20, "20.4 ± 0.7"], ["b", "1"]]
    Table("Title", ["", "1 % labels"], rows).print()
    assert any(rows[0][0].strip() in line and rows[0][1] in line for line in capsys.readouterr().out.splitlines())
