"""Prompt files: JSON lines with `prompt` or `turns`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

PACKAGED = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Prompt:
    """One conversation to lead: the turns of the user, each after the answer to the one before."""

    id: str
    category: str
    turns: tuple[str, ...]


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


Named = TypeVar("Named", bound=_HasId)


def load_prompts(path: Path = PACKAGED) -> list[Prompt]:
    """Reads a prompt file, as `read_json_lines` does.

    Each object has `prompt` (a string) or `turns` (a list of strings), and may have `id` (or
    `question_id`, `task_id`; default: the line number) and `category`.
    """
    return read_json_lines(path, parse_prompt, option="prompts")


def read_json_lines(
    path: Path,
    parse: Callable[[dict[str, Any], str, int], Named],
    *,
    option: str,
    instead: str = "a JSONL file",
) -> list[Named]:
    """Reads a file of JSON objects, one per line; empty lines are skipped.

    Args:
        path: the file.
        parse: makes a record of an object, its place in words and its line number; raises
            ValueError where it cannot.
        option, instead: for errors, what the user called the file, and can give.

    Raises:
        ValueError: the file cannot be read or is empty, a line is not a JSON object, or two records
            have one id.
    """
    records: dict[str, Named] = {}
    way_out = "write one object per line."
    for where, number, item in json_lines(path, f"{option}={path}", instead, way_out):
        if not isinstance(item, dict):
            raise ValueError(f'{where} is not a JSON object; write {{"prompt": "..."}}.')
        record = parse(item, where, number)
        if record.id in records:
            raise ValueError(f"{option}={path}: id {record.id!r} appears twice; ids must differ.")
        records[record.id] = record
    if not records:
        raise ValueError(f"{option}={path} is empty; give one JSON object with 'prompt' per line.")
    return list(records.values())


def json_lines(
    path: Path, name: str, instead: str, way_out: str, *, complete: bool = False
) -> Iterator[tuple[str, int, Any]]:
    """Reads a file with a JSON value in each line that is not empty.

    Args:
        path: the file.
        name, instead: for errors, what the file is called, and what the user can give.
        way_out: what the error says of a line that is not JSON.
        complete: whether a last line without its end is left out.

    Yields:
        The place in words, the line's number from 1, and the value.

    Raises:
        ValueError: the file cannot be read, or a line is not JSON.
    """
    try:
        # Not splitlines, which also cuts at characters that JSON allows within a text.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} cannot be read: {error}; give {instead}.") from error
    for number, line in enumerate(lines[:-1] if complete else lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}; {way_out}") from error
            yield where, number, value


def parse_prompt(
    item: dict[str, Any],
    where: str,
    number: int,
    fields: str = "'prompt' (a string) nor 'turns' (a list of strings)",
) -> Prompt:
    """Makes a prompt of a line, as `read_json_lines` calls it; `fields` is for its error."""
    turns = item.get("turns", [item["prompt"]] if "prompt" in item else None)
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise ValueError(f"{where} has neither {fields}; add one.")
    ids = (item[key] for key in ("id", "question_id", "task_id") if key in item)
    return Prompt(str(next(ids, number)), str(item.get("category", "")), tuple(turns))
