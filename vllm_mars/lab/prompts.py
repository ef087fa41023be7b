"""Prompt files: JSON lines with `prompt` or `turns`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGED = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Prompt:
    """A conversation, given by the user's turns."""

    id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(path: Path = PACKAGED) -> list[Prompt]:
    """Reads a file with one JSON object per line; empty lines are skipped.

    Each object has `prompt` (a string) or `turns` (a list of strings), and may have `id` (or
    `question_id`, `task_id`; default: the line number) and `category`. Nulls are ignored.

    Raises:
        ValueError: the file is unreadable or empty, a line is invalid, or an id appears twice.
    """
    prompts: dict[str, Prompt] = {}
    try:
        # splitlines would also split at characters that JSON allows in strings.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts={path} cannot be read: {error}; give a JSONL file.") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompt = _parse(line, f"{path}, line {number}", number)
            if prompt.id in prompts:
                raise ValueError(
                    f"prompts={path}: id {prompt.id!r} appears twice; ids must differ."
                )
            prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f"prompts={path} is empty; give one JSON object with 'prompt' per line.")
    return list(prompts.values())


def _parse(line: str, where: str, number: int) -> Prompt:
    try:
        item: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}; write one object per line.") from error
    if not isinstance(item, dict):
        raise ValueError(f'{where} is not a JSON object; write {{"prompt": "..."}}.')
    item = {key: value for key, value in item.items() if value is not None}
    turns = item.get("turns", [item.get("prompt")])
    texts: list[Any] = turns if isinstance(turns, list) and turns else [None]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(
            f"{where} has neither 'prompt' (a string) nor 'turns' (a list of strings); add one."
        )
    ids = (item[key] for key in ("id", "question_id", "task_id") if key in item)
    return Prompt(str(next(ids, number)), str(item.get("category", "")), tuple(texts))
