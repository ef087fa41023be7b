"""Tables of Markdown, for the docs and for a terminal."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.columns import Columns


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table: the first column to the left, all others to the right.

    Args:
        columns: their names.
        rows: a text for each column.
    """
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return [f"| {' | '.join(row)} |" for row in (columns, rule, *rows)]


def described(columns: Columns, items: Iterable[Any]) -> list[str]:
    """The lines of a table with a row for each item."""
    return table(list(columns), [[text(item) for text in columns.values()] for item in items])


def transposed(labels: Columns, columns: Iterable[str], items: Iterable[Any]) -> list[str]:
    """The lines of a table with a column for each item, whose names are `columns`."""
    items = list(items)
    return table(["", *columns], [(name, *map(text, items)) for name, text in labels.items()])
