"""Prompt files: JSON lines with `prompt` or `turns`."""

import json
from dataclasses import dataclass
from pathlib import Path

PACKAGED = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Prompt:
    """One conversation to lead.

    Attributes:
        id: unique within the file.
        category: kind of task, or "".
        turns: what the user says, in order; each turn follows the answer to the one before.
    """

    id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(path: Path = PACKAGED) -> list[Prompt]:
    """Reads a prompt file.

    Args:
        path: JSON lines. Each object has `prompt` (a string) or `turns` (a list of strings), and
            may have `id` (or `question_id`; default: the line number) and `category`.

    Returns:
        The prompts in the order of the file, at least one.

    Raises:
        ValueError: the file cannot be read, is empty, or a line is not such an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts={path} cannot be read: {error}; give a JSONL file.") from error
    prompts = [
        _parse(line, f"{path}, line {number}", number)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"prompts={path} is empty; give one JSON object with 'prompt' per line.")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"prompts={path}: id {prompt.id!r} appears twice; ids must differ.")
        seen.add(prompt.id)
    return prompts


def _parse(line: str, where: str, number: int) -> Prompt:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}; write one object per line.") from error
    if not isinstance(item, dict):
        raise ValueError(f"{where} is not a JSON object; write {{'prompt': '...'}}.")
    turns = item.get("turns", [item["prompt"]] if "prompt" in item else None)
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise ValueError(
            f"{where} has neither 'prompt' (a string) nor 'turns' (a list of strings); add one."
        )
    name = item.get("id", item.get("question_id", number))
    return Prompt(str(name), str(item.get("category", "")), tuple(turns))
