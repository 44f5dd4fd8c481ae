"""CSV cells that are safe in a spreadsheet, which would run some text as a formula."""

from typing import Any

LIKE_FORMULAS = ("=", "+", "-", "@", "'")


def written(value: Any) -> Any:
    """The value for the file: text that begins like a formula, or with an apostrophe, gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(LIKE_FORMULAS) else value


def read(cell: str) -> str:
    """The text that was given to `written`."""
    cell = cell.strip()
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(LIKE_FORMULAS) else cell
