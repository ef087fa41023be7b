"""What the demo prints: a table each for greedy and sampled requests, an answer, a sentence."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from vllm_mars.experiments.plan import STRICT
from vllm_mars.experiments.records import SweepFile
from vllm_mars.experiments.rows import (
    Row,
    points,
    rich_table,
    rows,
    shown,
    tables,
    turned,
    without_times,
)

RELAXED_STYLE = "bold black on yellow"
MAX_LISTED = 8
# Steps that take so much longer are a cost of their own, not one of the tokens.
STEP_TOLERANCE = 0.02


def print_report(file: SweepFile, console: Console) -> None:
    """Prints the rows of a demo: of strict verification and of MARS, at each temperature."""
    found = points(rows(file))
    for group in found:
        if any(row.is_uneven for row in group):
            group = [without_times(row) for row in group]
        (table,) = tables(group, STRICT)
        console.print(rich_table(turned(table)))
    for row in itertools.chain(*found):
        if row.example:
            _print_example(row, console)
    for group in found:
        beside = beside_the_best(file, group)
        for row in beside:
            if row.cell.is_lossy:
                console.print(conclusion(row, beside[0]), soft_wrap=True)


def beside_the_best(file: SweepFile, group: Sequence[Row]) -> list[Row]:
    """The rows of a temperature beside the strict rule that is fastest per answer; it is first."""
    strict = [row for row in group if not row.cell.is_lossy and row.time]
    best = min(strict, key=lambda row: row.time or (math.inf,)).cell.name if strict else STRICT
    heads = [replace(head, baseline=best) for head in file.heads]
    temperature = group[0].cell.temperature
    records = [it for it in file.records if it.temperature == temperature]
    return rows(SweepFile(heads, records))


def conclusion(row: Row, base: Row) -> str:
    """What the figures of a lossy row say, in whichever direction they point."""
    where = "Greedy" if row.cell.temperature == 0 else f"At temperature {row.cell.temperature:g}"
    text = (
        f"{where}, {row.cell.name} takes {shown(row.gain, '.2f') or 'unknown'} times as many "
        f"tokens per step as {base.cell.name}, with "
        f"{shown(row.lost, '.4f', ends=False) or 'unknown'} nats lost per token. "
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
    text += f"An answer takes {base.cell.name} {shown(row.speed, '.2f')} times as long"
    text += ": no difference shown." if row.speed.low <= 1 <= row.speed.high else "."
    step = row.step_ratio
    if step is not None and abs(step.value - 1) > STEP_TOLERANCE:
        text += f" A step of {row.cell.name} takes {shown(step, '.2f')} times as long."
    return text


def _print_example(row: Row, console: Console) -> None:
    """One answer with its relaxed tokens, each beside the target's first choice."""
    marked, relaxed = Text(), [token for token in row.example if token.lost is not None]
    in_colour = console.is_terminal and not console.no_color
    for token in row.example:
        if token.lost is None:
            marked.append(token.text)
        else:
            text = token.text if in_colour else f"[{token.text}]"
            marked.append(text, RELAXED_STYLE if in_colour else None)
    title = f"A greedy answer of {row.cell.name}: {len(relaxed)} relaxed tokens are marked"
    console.print(Panel(marked, title=title))
    if not relaxed:
        return
    p = Column("p", justify="right")
    table = Table("relaxed token", p, "target's first choice", p.copy(), "nats lost")
    for token in relaxed[:MAX_LISTED]:
        table.add_row(
            Text(repr(token.text)),
            f"{token.p:.2f}",
            Text(repr(token.best)),
            f"{token.best_p:.2f}",
            f"{token.lost:.2f}",
        )
    if len(relaxed) > MAX_LISTED:
        table.caption = f"and {len(relaxed) - MAX_LISTED} more"
    console.print(table)
