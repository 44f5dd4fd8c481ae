"""Tables on a terminal, in Markdown and in HTML."""

import html
from collections.abc import Sequence


class Table:
    """Rows of text with a head; the first column has the names of the rows."""

    def __init__(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""):
        self.title, self.head, self.rows, self.note = title, head, rows, note

    def markdown(self) -> str:
        lines = [self.head, ["---"] + ["---:"] * (len(self.head) - 1), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.head)
        rows = ""
        for name, *cells in self.rows:
            numbers = "".join(f"<td class=number>{html.escape(cell)}</td>" for cell in cells)
            rows += f"<tr><td>{html.escape(name)}</td>{numbers}</tr>"
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        title = f"<h2>{html.escape(self.title)}</h2>" if self.title else ""
        return f"{title}<table><tr>{head}</tr>{rows}</table>{note}"

    def print(self) -> None:
        """Each row on one line if it fits; else names, heads, then cells are wrapped between words. Nothing is cut."""
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
