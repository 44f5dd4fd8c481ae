"""Cells of CSV files that are safe in a spreadsheet, which takes some text for a formula."""

from typing import Any

LIKE_FORMULAS = ("=", "+", "-", "@", "'")


def written(value: Any) -> Any:
    """With an apostrophe in front of text that begins like a formula, or like such an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(LIKE_FORMULAS) else value


def read(cell: str) -> str:
    """What `written` was given."""
    cell = cell.strip()
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(LIKE_FORMULAS) else cell
