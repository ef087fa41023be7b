"""The file of a sweep: JSON lines, one for each measured cell and one for each cell's quality.

    {"kind": "cell", "schema": 1, "key": {...}, "status": "ok", "speed": {...}, ...}
    {"kind": "quality", "schema": 1, "key": {...}, "prompts": [...], "estimates": [...]}

Lines are only appended, so a sweep that is killed loses at most the line it was writing, and the
reader leaves out a last line that is not complete. A cell that failed may be measured again in a
later line. Quality is judged after the cells, since it compares them with the autoregressive ones;
`read_cells` puts it into `Cell.quality`.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_mars.experiments.sweep.records import Cell, CellKey, Quality
from vllm_mars.local.prompts import json_lines

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA = 1

_T = TypeVar("_T")


def append_cell(path: Path, cell: Cell) -> None:
    """Appends a cell's line; its quality is a line of its own (`append_quality`)."""
    content = dataclasses.asdict(dataclasses.replace(cell, quality=None))
    if not cell.node:
        del content["node"]
    _append(path, "cell", content)


def append_quality(path: Path, key: CellKey, quality: Quality) -> None:
    """Appends the quality of the cell with this key; the last one of a key counts."""
    _append(path, "quality", {"key": dataclasses.asdict(key), **dataclasses.asdict(quality)})


def read_cells(paths: Path | Iterable[Path]) -> list[Cell]:
    """Reads the files of one or more sweeps.

    Returns:
        The cells in the order of the files, each with its quality where that was judged. A last
        line without its end, of a sweep that was killed, is left out.

    Raises:
        ValueError: a file cannot be read, has another schema, a line that is not a record, a key
            again that was measured, or quality of a cell that is not there.
    """
    cells: dict[CellKey, Cell] = {}
    for path in [paths] if isinstance(paths, Path) else paths:
        for where, kind, data in _lines(path):
            if kind == "cell":
                cell = _validated(Cell, data, where)
                if cell.key in cells and cells[cell.key].status == "ok":
                    raise ValueError(
                        f"{where} measures {cell.key.label} a second time; remove one of the two."
                    )
                cells[cell.key] = cell
            else:
                key = _validated(CellKey, data.pop("key", None), where)
                if key not in cells:
                    raise ValueError(
                        f"{where} judges {key.label}, which no earlier line measured; remove it."
                    )
                quality = _validated(Quality, data, where)
                cells[key] = dataclasses.replace(cells[key], quality=quality)
    return list(cells.values())


def repair_end(path: Path) -> None:
    """Cuts off a last line without its end, which a killed sweep left, before more is appended."""
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        with path.open("r+b") as file:
            file.truncate(complete)


def _append(path: Path, kind: str, content: dict[str, Any]) -> None:
    line = json.dumps(
        {"kind": kind, "schema": SCHEMA, **content}, ensure_ascii=False, allow_nan=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def _lines(path: Path) -> Iterable[tuple[str, str, dict[str, Any]]]:
    instead = "a file of `vllm-mars sweep`"
    for where, _, data in json_lines(path, str(path), instead, f"is it {instead}?", complete=True):
        if not isinstance(data, dict) or data.get("kind") not in ("cell", "quality"):
            found = data.get("kind") if isinstance(data, dict) else data
            raise ValueError(
                f"{where} is neither a cell nor its quality: its kind is {found!r:.80}; give "
                f"{instead}."
            )
        if (schema := data.pop("schema", None)) != SCHEMA:
            raise ValueError(
                f"{where} has schema={schema}, not {SCHEMA}; read it with the "
                "release that wrote it."
            )
        yield where, data.pop("kind"), data


@functools.cache
def _adapter(kind: type[Any]) -> "TypeAdapter[Any]":
    """Reads a record and all within it; refuses unknown fields, text for numbers and NaN."""
    from pydantic import ConfigDict, TypeAdapter, with_config

    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return TypeAdapter(with_config(config)(kind))


def _validated(kind: type[_T], data: object, where: str) -> _T:
    from pydantic import ValidationError

    try:
        # mypy does not take a class for hashable.
        record: _T = _adapter(kind).validate_json(json.dumps(data))  # type: ignore[arg-type]
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"]) or kind.__name__.lower()
        message = problem["msg"].removeprefix("Value error, ").rstrip(".")
        raise ValueError(f"{where}: {place}: {message}.") from error
    return record
