"""Columns of tables: what gives a figure's text, for pages and docs."""

from collections.abc import Callable, Mapping
from typing import Any

Text = Callable[[Any], str]
# What gives an item's text, by the column's name.
Columns = Mapping[str, Text]


def shown(value: float, low: float, high: float, *, form: str = ".2f") -> str:
    """An estimate with its interval, such as "1.15 (1.02 to 1.33)"; alone where both ends meet."""
    ends = f" ({low:{form}} to {high:{form}})" if low < high else ""
    return f"{value:{form}}{ends}"


def follow(of: Any, path: str) -> Any:
    """What lies in an item at keys or attributes with slashes between them; None if nothing."""
    for name in path.split("/"):
        of = of.get(name) if isinstance(of, dict) else getattr(of, name, None)
    return of


def at(path: str, form: str = "", times: float = 1) -> Text:
    """The text of a figure.

    Args:
        path: where it is, as names with slashes between them; it may be an interval.
        form: as `format` takes it.
        times: what it is multiplied by.
    """

    def text(of: Any) -> str:
        found = follow(of, path)
        if found is None or isinstance(found, str):
            return found or ""
        ends = [follow(found, name) for name in ("value", "low", "high")]
        if None in ends:
            return format(times * found, form)
        return shown(*(times * end for end in ends), form=form)

    return text
