"""Prompt files: JSON lines with `prompt` or `turns`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGED = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Prompt:
    """One conversation to lead: the turns of the user, each after the answer to the one before."""

    id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(path: Path = PACKAGED) -> list[Prompt]:
    """Reads a file with a JSON object in each line that is not empty.

    Each object has `prompt` (a string) or `turns` (a list of strings), and may have `id` (or
    `question_id`, `task_id`; default: the line number) and `category`. A null is as if left out.

    Raises:
        ValueError: the file cannot be read or is empty, a line is no such object, or two have one
            id.
    """
    found: dict[str, Prompt] = {}
    try:
        # Not splitlines, which also cuts at characters that JSON allows within a text.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts={path} cannot be read: {error}; give a JSONL file.") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompt = _parse(line, f"{path}, line {number}", number)
            if prompt.id in found:
                raise ValueError(
                    f"prompts={path}: id {prompt.id!r} appears twice; ids must differ."
                )
            found[prompt.id] = prompt
    if not found:
        raise ValueError(f"prompts={path} is empty; give one JSON object with 'prompt' per line.")
    return list(found.values())


def _parse(line: str, where: str, number: int) -> Prompt:
    try:
        item: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}; write one object per line.") from error
    if not isinstance(item, dict):
        raise ValueError(f'{where} is not a JSON object; write {{"prompt": "..."}}.')
    item = {key: value for key, value in item.items() if value is not None}
    turns = item.get("turns", [item.get("prompt")])
    given: list[Any] = turns if isinstance(turns, list) and turns else [None]
    if not all(isinstance(turn, str) and turn.strip() for turn in given):
        raise ValueError(
            f"{where} has neither 'prompt' (a string) nor 'turns' (a list of strings); add one."
        )
    ids = (item[key] for key in ("id", "question_id", "task_id") if key in item)
    return Prompt(str(next(ids, number)), str(item.get("category", "")), tuple(given))
