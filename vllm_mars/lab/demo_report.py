"""Report of the demo: tables of greedy and sampled requests, two example answers, conclusions.

The examples are chosen by rule from the greedy answers that MARS changed: the one that shares most
words with the strict answer, and the one whose relaxed tokens lost most.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from vllm_mars.lab.plan import STRICT
from vllm_mars.lab.records import Answer, Piece, SweepFile
from vllm_mars.lab.rows import (
    Row,
    points,
    rich_table,
    rows,
    shown,
    tables,
    transposed,
    without_times,
)

RELAXED_STYLE = "bold black on yellow"
# Narrower consoles show answers one below the other.
SIDE_BY_SIDE_WIDTH = 100
# A larger difference in seconds per step is reported separately from the tokens per step.
STEP_TOLERANCE = 0.02


class Example(NamedTuple):
    strict: Answer
    lossy: Answer

    @property
    def alike(self) -> float:
        """Share of words that both answers have in the same order."""
        strict, lossy = self.strict.text.split(), self.lossy.text.split()
        return difflib.SequenceMatcher(None, strict, lossy, autojunk=False).ratio()


def changed(file: SweepFile) -> list[Example]:
    """Returns pairs of strict and changed answers, in no particular order."""
    strict: dict[str, Answer] = {}
    lossy: dict[str, Answer] = {}
    for record in file.records:
        if record.temperature == 0 and record.measured:
            answers = strict if record.name == file.heads[-1].baseline else lossy
            answers |= {answer.prompt: answer for answer in record.measured.answers}
    pairs = [Example(strict[prompt], lossy[prompt]) for prompt in lossy if prompt in strict]
    return [pair for pair in pairs if pair.lossy.lost and pair.lossy.text != pair.strict.text]


def chosen(examples: Sequence[Example]) -> dict[str, Example]:
    """Chooses two of at least one changed answers, by title."""
    return {
        "The one that changed least": max(examples, key=lambda example: example.alike),
        "The one that lost most": max(examples, key=lambda example: sum(example.lossy.lost)),
    }


def around(piece: Piece) -> tuple[str, str, str]:
    """Splits a relaxed token from the white space around it; white space becomes a symbol."""
    token = piece.text.strip()
    if not token:
        return ("", "↵", piece.text) if "\n" in piece.text else ("", "␣", "")
    before, _, after = piece.text.partition(token)
    return before, token, after


def print_report(file: SweepFile, prompts: Mapping[str, str], console: Console) -> None:
    """Prints the tables, examples and conclusions of a demo; `prompts` are texts by prompt id."""
    groups = points(rows(file))
    for group in groups:
        if any(row.is_uneven for row in group):
            group = [without_times(row) for row in group]
        (table,) = tables(group, STRICT)
        console.print(rich_table(transposed(table)))
        lengths = ", ".join(
            f"{row.cell.name} {(row.cell.config or {}).get('num_speculative_tokens')}"
            for row in group
        )
        console.print(f"Draft tokens a step: {lengths}.")
    _print_examples(changed(file), prompts, console)
    for base, *others in groups:
        for row in others:
            console.print(conclusion(row, base), soft_wrap=True)


def conclusion(row: Row, base: Row) -> str:
    where = "Greedy" if row.cell.temperature == 0 else f"At temperature {row.cell.temperature:g}"
    text = (
        f"{where}, {row.cell.name} takes {shown(row.gain, '.2f') or 'unknown'} times as many "
        f"tokens per step as {base.cell.name}, with "
        f"{shown(row.lost, '.4f', ends=False) or 'unknown'} nats lost per token and answers of "
        f"{shown(row.length, '.1f', ends=False)} tokens compared with "
        f"{shown(base.length, '.1f', ends=False)}. "
    )
    uneven = [
        f"{rule.cell.name} {min(rule.paces):.0f} to {max(rule.paces):.0f} tokens/s"
        for rule in (row, base)
        if rule.is_uneven
    ]
    if uneven:
        return (
            f"{text}But no speed is reported: turns of one rule differ by more than a third "
            f"({', '.join(uneven)}); --anew measures again, best while nothing else runs."
        )
    if row.speed is None:
        return f"{text}But the speed was not measured."
    text += f"Its answers came {shown(row.speed, '.2f')} times as fast: "
    if row.speed.low <= 1 <= row.speed.high:
        text += "no difference is shown."
    else:
        text += f"{row.cell.name} is {'faster' if row.speed.low > 1 else 'slower'}."
    step = row.step_ratio
    if step is not None and abs(step.value - 1) > STEP_TOLERANCE:
        text += f" A step of {row.cell.name} takes {shown(step, '.2f')} times as long."
    return text


def _print_examples(
    examples: Sequence[Example], prompts: Mapping[str, str], console: Console
) -> None:
    if not examples:
        console.print("MARS changed no greedy answer.")
        return
    console.print(
        f"MARS changed {len(examples)} greedy answers. These are the one that shares most words "
        "with the strict answer, and the one whose relaxed tokens lost most. Relaxed tokens are "
        "marked.",
        soft_wrap=True,
    )
    for which, (strict, lossy) in chosen(examples).items():
        name = strict.prompt
        console.print(Panel(Text(prompts.get(name, name)), title=Text(f"{which}: {name}")))
        title = f"MARS, relaxed {len(lossy.lost)} for {sum(lossy.lost):.2f} nats"
        strict_text = Text(strict.text)
        lossy_text = _marked(lossy, console)
        if console.width >= SIDE_BY_SIDE_WIDTH:
            table = Table(Column("strict", ratio=1), Column(title, ratio=1), expand=True)
            table.add_row(strict_text, lossy_text)
            console.print(table)
        else:
            console.print(Panel(strict_text, title="strict"))
            console.print(Panel(lossy_text, title=title))


def _marked(answer: Answer, console: Console) -> Text:
    in_colour = console.is_terminal and not console.no_color
    marked = Text()
    for piece in answer.pieces:
        if piece.lost is None:
            marked.append(piece.text)
            continue
        before, token, after = around(piece)
        marked.append(before)
        marked.append(token if in_colour else f"[{token}]", RELAXED_STYLE if in_colour else None)
        marked.append(after)
    return marked
