"""What the demo prints: a table each for greedy and sampled requests, two answers, a sentence.

Of the greedy answers that MARS changed, two are shown, which nobody chooses by hand: the one that
shares most words with the strict answer, and the one whose relaxed tokens lost most.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_mars.lab.plan import STRICT
from vllm_mars.lab.records import Answer, Piece, SweepFile
from vllm_mars.lab.rows import Row, points, rich_table, rows, shown, tables, turned, without_times

RELAXED_STYLE = "bold black on yellow"
# Below it answers stand below each other.
SIDE_BY_SIDE_WIDTH = 100
# Steps that take so much longer are a cost of their own, not one of the tokens.
STEP_TOLERANCE = 0.02


class Example(NamedTuple):
    """Two answers to one prompt."""

    strict: Answer
    lossy: Answer

    @property
    def alike(self) -> float:
        """The share of words that stand in both answers in the same order."""
        strict, lossy = self.strict.text.split(), self.lossy.text.split()
        return difflib.SequenceMatcher(None, strict, lossy, autojunk=False).ratio()


def changed(file: SweepFile) -> list[Example]:
    """The answers that relaxed tokens changed, beside those of the baseline, in any order."""
    strict: dict[str, Answer] = {}
    lossy: dict[str, Answer] = {}
    for record in file.records:
        if record.temperature == 0 and record.measured:
            own = strict if record.name == file.heads[-1].baseline else lossy
            own |= {answer.prompt: answer for answer in record.measured.answers}
    found = [Example(strict[prompt], lossy[prompt]) for prompt in lossy if prompt in strict]
    return [it for it in found if it.lossy.lost and it.lossy.text != it.strict.text]


def chosen(found: Sequence[Example]) -> dict[str, Example]:
    """Two of the changed answers, by what they are; there must be one at least."""
    return {
        "The one that changed least": max(found, key=lambda it: it.alike),
        "The one that lost most": max(found, key=lambda it: sum(it.lossy.lost)),
    }


def told(found: Sequence[Example]) -> str:
    """What the two answers of `chosen` are."""
    return (
        f"MARS changed {len(found)} greedy answers. These are the one that shares most words with "
        "the strict answer, and the one whose relaxed tokens lost most."
    )


def around(piece: Piece) -> tuple[str, str, str]:
    """A relaxed token between the white space around it; a sign for one that is nothing else."""
    token = piece.text.strip()
    if not token:
        return ("", "↵", piece.text) if "\n" in piece.text else ("", "␣", "")
    before, _, after = piece.text.partition(token)
    return before, token, after


def print_report(file: SweepFile, prompts: Mapping[str, str], console: Console) -> None:
    """Prints the rows of a demo: of strict verification and of MARS, at each temperature.

    Args:
        prompts: the text of each, by its id.
    """
    found = points(rows(file))
    for group in found:
        if any(row.is_uneven for row in group):
            group = [without_times(row) for row in group]
        (table,) = tables(group, STRICT)
        console.print(rich_table(turned(table)))
        console.print(f"Draft tokens a step: {_lengths(group)}.")
    _print_examples(changed(file), prompts, console)
    for base, *others in found:
        for row in others:
            console.print(conclusion(row, base), soft_wrap=True)


def conclusion(row: Row, base: Row) -> str:
    """What the figures of a lossy row say, in whichever direction they point."""
    where = "Greedy" if row.cell.temperature == 0 else f"At temperature {row.cell.temperature:g}"
    text = (
        f"{where}, {row.cell.name} takes {shown(row.gain, '.2f') or 'unknown'} times as many "
        f"tokens per step as {base.cell.name}, with "
        f"{shown(row.lost, '.4f', ends=False) or 'unknown'} nats lost per token and answers of "
        f"{shown(row.length, '.1f', ends=False)} tokens beside "
        f"{shown(base.length, '.1f', ends=False)}. "
    )
    uneven = [
        f"{it.cell.name} {min(it.paces):.0f} to {max(it.paces):.0f} tokens/s"
        for it in (row, base)
        if it.is_uneven
    ]
    if uneven:
        return (
            f"{text}But no speed is told: turns of one rule differ by more than a third "
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


def _lengths(group: Sequence[Row]) -> str:
    return ", ".join(
        f"{row.cell.name} {(row.cell.config or {}).get('num_speculative_tokens')}" for row in group
    )


def _print_examples(found: Sequence[Example], prompts: Mapping[str, str], console: Console) -> None:
    """Two of the answers that MARS changed, each beside the strict one."""
    if not found:
        console.print("MARS changed no greedy answer.")
        return
    console.print(f"{told(found)} Relaxed tokens are marked.", soft_wrap=True)
    for which, (strict, lossy) in chosen(found).items():
        name = strict.prompt
        console.print(Panel(Text(prompts.get(name, name)), title=Text(f"{which}: {name}")))
        titles = (
            "strict",
            f"MARS, relaxed {len(lossy.lost)} for {sum(lossy.lost):.2f} nats",
        )
        texts = (Text(strict.text), _marked(lossy, console))
        if console.width >= SIDE_BY_SIDE_WIDTH:
            table = Table(*titles, expand=True)
            for column in table.columns:
                column.ratio = 1
            table.add_row(*texts)
            console.print(table)
        else:
            for title, text in zip(titles, texts, strict=True):
                console.print(Panel(text, title=title))


def _marked(answer: Answer, console: Console) -> Text:
    in_colour = console.is_terminal and not console.no_color
    marked = Text()
    for piece in answer.pieces:
        if piece.lost is None:
            marked.append(piece.text)
            continue
        before, token, after = around(piece)
        marked.append(before)
        if in_colour:
            marked.append(token, RELAXED_STYLE)
        else:
            marked.append(f"[{token}]")
        marked.append(after)
    return marked
