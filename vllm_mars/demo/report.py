"""What the demo prints: a table each for greedy and sampled requests, an answer, a sentence."""

import math
from dataclasses import replace

from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from vllm_mars.experiments.plan import STRICT
from vllm_mars.experiments.records import SweepFile
from vllm_mars.experiments.rows import Row, rich_table, rows, shown, tables, turned

RELAXED_STYLE = "bold black on yellow"
MAX_LISTED = 8
# Steps that take so much longer are a cost of their own, not one of the tokens.
STEP_TOLERANCE = 0.02


def print_report(file: SweepFile, console: Console) -> None:
    """Prints the rows of a demo: of strict verification and of MARS, at each temperature."""
    found = rows(file)
    for table in tables(found, STRICT):
        console.print(rich_table(turned(table)))
    for row in found:
        if row.example:
            _print_example(row, console)
    for temperature in dict.fromkeys(row.cell.temperature for row in found):
        best, beside = beside_the_best(file, temperature)
        for row in beside:
            if row.cell.is_lossy:
                console.print(conclusion(row, best), soft_wrap=True)


def beside_the_best(file: SweepFile, temperature: float) -> tuple[str, list[Row]]:
    """The strict rule that is fastest per answer at a temperature, and the rows beside it."""
    found = [row for row in rows(file) if row.cell.temperature == temperature]
    strict = [row for row in found if not row.cell.is_lossy and row.time]
    best = min(strict, key=lambda row: row.time or (math.inf,)).cell.name if strict else STRICT
    heads = [replace(head, baseline=best) for head in file.heads]
    beside = rows(replace(file, heads=heads))
    return best, [row for row in beside if row.cell.temperature == temperature]


def conclusion(row: Row, baseline: str) -> str:
    """What the figures of a lossy row say, in whichever direction they point."""
    where = "Greedy" if row.cell.temperature == 0 else f"At temperature {row.cell.temperature:g}"
    speed = row.speed
    if speed is None:
        return f"{where}: the speed was not measured."
    factor = shown(speed, ".2f")
    loss = f"{shown(row.lost, '.4f', ends=False) or 'unknown'} nats lost per token"
    if speed.low > 1:
        text = f"{where}, {row.cell.name} is {factor} times as fast per answer as {baseline}"
    elif speed.high < 1:
        text = f"{where}, {row.cell.name} is slower than {baseline}: {factor} times as fast"
    else:
        text = f"{where}, {row.cell.name} and {baseline} do not differ in speed: {factor} times"
    text += f", with {loss}."
    gain, step = row.gain, row.step_ratio
    if gain is not None:
        text += f" It takes {shown(gain, '.2f')} times as many tokens per step"
        if step is not None and abs(step.value - 1) > STEP_TOLERANCE:
            text += f", and its steps take {shown(step, '.2f')} times as long"
        text += "."
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
