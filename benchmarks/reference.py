"""API reference of the site, from docstrings and signatures by griffe."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"^<!-- api: (\S+) -->$", re.MULTILINE)
# griffe's kinds of sections, and the column titles of their entries.
TABLES = {"parameters": "argument", "attributes": "field"}
FIELD = re.compile(r"^Field\(default=([^,)]+).*$")
LISTS = {"returns": "Returns", "raises": "Raises"}


def shown(page: str) -> str:
    """Replaces each `<!-- api: NAME -->` of a page."""
    return PLACE.sub(lambda match: "\n".join(lines(match[1])), page)


def lines(path: str) -> Iterable[str]:
    """Yields the reference of a name, without importing it; ValueError if it has no docstring."""
    import griffe

    try:
        member: Any = griffe.load(path, search_paths=[ROOT], allow_inspection=False)
    except (ImportError, KeyError) as error:
        raise ValueError(f"api: there is no {path}: {error}.") from error
    if member.docstring is None:
        raise ValueError(f"api: {path} has no docstring.")
    defaults = _defaults(member)
    for section in member.docstring.parse("google"):
        kind = section.kind.value
        if kind == "text":
            yield from (*section.value.split("\n"), "")
        elif kind in TABLES:
            yield f"| {TABLES[kind]} | default | meaning |"
            yield "| --- | --- | --- |"
            for entry in section.value:
                default = f"`{defaults[entry.name]}`" if entry.name in defaults else ""
                yield f"| `{entry.name}` | {default} | {_cell(entry.description)} |"
            yield ""
        elif kind in LISTS:
            entries = "; ".join(
                f"`{entry.annotation}`: {_cell(entry.description)}"
                if kind == "raises"
                else _cell(entry.description)
                for entry in section.value
            )
            yield from (f"{LISTS[kind]}: {entries}", "")


def _defaults(member: Any) -> dict[str, str]:
    """Returns the defaults of a function's arguments, or of a class's `__init__` or fields."""
    if member.is_class and "__init__" in member.members:
        member = member.members["__init__"]
    if member.is_class:
        values = {name: getattr(field, "value", None) for name, field in member.members.items()}
    else:
        values = {parameter.name: parameter.default for parameter in member.parameters}
    texts = {name: str(value) for name, value in values.items() if value is not None}
    # The docstring describes defaults from a factory.
    return {
        name: FIELD.sub(r"\1", value)
        for name, value in texts.items()
        if not value.startswith("Field(default_factory")
    }


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
