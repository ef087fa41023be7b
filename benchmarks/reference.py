"""What the site says of each name of the API: out of its docstring and signature, by griffe."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"^<!-- api: (\S+) -->$", re.MULTILINE)
# griffe's kinds of sections, by what a table calls their entries.
TABLES = {"parameters": "argument", "attributes": "field"}
FIELD = re.compile(r"^Field\(default=([^,)]+).*$")
LISTS = {"returns": "Returns", "raises": "Raises"}


def shown(page: str) -> str:
    """A page with what stands for each `<!-- api: NAME -->`."""
    return PLACE.sub(lambda at: "\n".join(lines(at[1])), page)


def lines(path: str) -> Iterable[str]:
    """The lines that stand for one name, such as `vllm_mars.functions.verify.verify_greedy`.

    Sources are read, nothing is imported.

    Raises:
        ValueError: there is no such name, or it has no docstring.
    """
    import griffe

    try:
        found: Any = griffe.load(path, search_paths=[ROOT], allow_inspection=False)
    except (ImportError, KeyError) as error:
        raise ValueError(f"api: there is no {path}: {error}.") from error
    if found.docstring is None:
        raise ValueError(f"api: {path} has no docstring.")
    defaults = _defaults(found)
    for section in found.docstring.parse("google"):
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
            told = "; ".join(
                f"`{entry.annotation}`: {_cell(entry.description)}"
                if kind == "raises"
                else _cell(entry.description)
                for entry in section.value
            )
            yield from (f"{LISTS[kind]}: {told}", "")


def _defaults(found: Any) -> dict[str, str]:
    """Name -> default, of a function's arguments, a class's fields or those of its `__init__`."""
    if found.is_class and "__init__" in found.members:
        found = found.members["__init__"]
    if found.is_class:
        given = {name: getattr(member, "value", None) for name, member in found.members.items()}
    else:
        given = {it.name: it.default for it in found.parameters}
    told = {name: str(value) for name, value in given.items() if value is not None}
    # One that pydantic makes anew for each object is told by the text.
    return {
        name: FIELD.sub(r"\1", value)
        for name, value in told.items()
        if not value.startswith("Field(default_factory")
    }


def _cell(text: str) -> str:
    """A text in one line, which ends no cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
