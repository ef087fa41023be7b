"""Columns of tables: what gives a figure's text, for pages and docs."""

from collections.abc import Callable, Iterable, Mapping
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


def score(name: str, form: str = ".2f", of: str = "value", row: str = "row") -> Text:
    """The text of a row's score, or of its "difference" from or "recovery" of the reference's."""

    def text(it: Any) -> str:
        found = follow(it, row).estimate(name)
        if (value := getattr(found, of, None)) is None:
            return ""
        if of == "value":
            return format(value, form)
        return shown(value, getattr(found, f"{of}_low"), getattr(found, f"{of}_high"), form=form)

    return text


def filled(columns: Columns, items: Iterable[Any]) -> Columns:
    """The columns in which some item has a text."""
    items = list(items)
    return {name: text for name, text in columns.items() if any(map(text, items))}


def pair(one: str, other: str, form: str) -> Text:
    """The texts of two figures."""
    return lambda of: ", ".join(filter(None, (at(path, form)(of) for path in (one, other))))
