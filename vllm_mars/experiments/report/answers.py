"""Answers with their relaxed tokens."""

from collections.abc import Iterable, Sequence

from vllm_mars.experiments.quality.judge import answers
from vllm_mars.experiments.sweep.records import Cell, OffChoice

MAX_ANSWERS = 6
# Text of an answer, and the relaxed token that it is; None where it is the target's own.
Piece = tuple[str, OffChoice | None]


def relaxed_answers(cells: Iterable[Cell]) -> dict[str, list[Piece]]:
    """Greedy answers of lossy rules by rule and prompt: those with most relaxed tokens."""
    richest: dict[str, tuple[int, str, list[Piece]]] = {}
    for cell in cells:
        if not cell.key.lossy or cell.key.temperature or cell.quality is None:
            continue
        texts = {name: answer.text for name, answer in answers(cell).items()}
        for prompt in cell.quality.prompts:
            name, count = prompt.prompt_id, len(prompt.off_choice)
            if name in texts and count > (richest[name][0] if name in richest else 0):
                title = f"{cell.key.rule}: {name} ({count} relaxed)"
                richest[name] = count, title, pieces(texts[name], prompt.off_choice)
    order = sorted(richest.values(), key=lambda item: -item[0])
    return {title: found for _, title, found in order[:MAX_ANSWERS]}


def pieces(text: str, off_choice: Sequence[OffChoice]) -> list[Piece]:
    """Cuts an answer at its relaxed tokens."""
    found: list[Piece] = []
    end = 0
    for token in sorted(off_choice, key=lambda token: token.start):
        if token.start < end:
            # Two tokens of one character, such as the bytes of an emoji.
            continue
        if token.start > end:
            found.append((text[end : token.start], None))
        end = max(token.end, token.start)
        found.append((text[token.start : end], token))
    return [*found, (text[end:], None)] if end < len(text) else found
