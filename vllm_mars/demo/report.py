"""The demo's report for the terminal."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from vllm_mars.experiments.sweep.measured import Interval, Measured, beside
from vllm_mars.experiments.sweep.records import Cell, Output, PromptQuality
from vllm_mars.experiments.sweep.summary import Row, rows

RELAXED_STYLE = "bold black on yellow"
WARNING_STYLE = "bold red"
MAX_LISTED = 12
# Kinds of prompt named at either end, and answers whose length changed most.
MAX_KINDS = 3
MAX_LENGTHS = 6
LABELS = {"autoregressive": "autoregressive", "standard": "strict", "mars": "MARS"}
PAIRS = (("standard", "autoregressive"), ("mars", "autoregressive"), ("mars", "standard"))
# Each figure of a server and its form; a server may lack it.
FIGURES: dict[str, tuple[Callable[[Measured], float | None], str]] = {
    "ms to first token (median)": (lambda of: of.ttft and 1000 * of.ttft.value, ".1f"),
    "ms per further token (median)": (lambda of: of.tpot and 1000 * of.tpot.value, ".1f"),
    "seconds per answer": (lambda of: of.seconds and of.seconds.value, ".2f"),
    "tokens per answer": (lambda of: of.length and of.length.value, ".1f"),
    "mean acceptance length": (lambda of: of.row.acceptance_length, ".2f"),
    "relaxed tokens": (lambda of: _relaxed_share(of.row) if of.row.key.lossy else None, ".1%"),
    "nats lost per token": (
        lambda of: _nats_per_token(of.row) if of.row.key.lossy else None,
        ".3f",
    ),
}


def print_report(cells: Sequence[Cell], kinds: Mapping[str, str], console: Console) -> None:
    """Prints the comparison and one answer with its relaxed tokens marked or in brackets.

    Args:
        cells: judged, of three servers: autoregressive, "standard" and of one rule of MARS.
        kinds: each prompt's id and category.
        console: where to print.
    """
    found: dict[str, Row] = {row.key.method: row for row in rows(cells)}
    console.print(_figures_table(found))
    console.print(_speed_table(found))
    _print_kinds(found, kinds, console)
    _print_lengths(found, console)
    differing = [name for name, of in _judged(found["standard"]).items() if not _agrees(of)]
    if differing:
        text = "The strict answers differ from the autoregressive ones at: " + ", ".join(differing)
        console.print(text, style=WARNING_STYLE)
    else:
        console.print("The strict answers equal the autoregressive ones, character for character.")
    judged = _judged(found["mars"])
    name = max(judged, key=lambda name: len(judged[name].off_choice))
    if judged[name].off_choice:
        _print_example(_first_pass(found["mars"])[name], judged[name], console)
    else:
        console.print("No token was relaxed in any answer.")


def _relaxed_share(row: Row) -> float:
    """The share of the tokens of the first pass that are not the target's first choice."""
    relaxed = sum(len(of.off_choice) for of in _judged(row).values())
    return relaxed / sum(output.output_tokens for output in _first_pass(row).values())


def _nats_per_token(row: Row) -> float:
    """What relaxed tokens lost against the target's first choices, as the server counts it."""
    lost = sum(cell.lost_nats or 0.0 for cell in row.cells)
    return lost / sum(output.output_tokens for cell in row.cells for output in cell.outputs)


def _first_pass(row: Row) -> dict[str, Output]:
    """An answer to each prompt: at temperature 0 repeats differ in time alone."""
    cells = (cell for cell in row.cells if not cell.key.repeat)
    return {output.prompt_id: output for cell in cells for output in cell.outputs}


def _judged(row: Row) -> dict[str, PromptQuality]:
    """What each answer of the first pass is worth."""
    return {
        of.prompt_id: of
        for cell in row.cells
        if not cell.key.repeat and cell.quality
        for of in cell.quality.prompts
    }


def _agrees(quality: PromptQuality) -> bool:
    return quality.scores["agreement"] == 1


def _figures_table(found: dict[str, Row]) -> Table:
    key = found["mars"].key
    measured = [beside(found[method], found["standard"]) for method in LABELS]
    names = {**LABELS, "mars": key.rule.replace("mars", LABELS["mars"], 1)}
    answers = _first_pass(found["mars"])
    (limit,) = {cell.settings.max_tokens for cell in found["mars"].cells}
    table = Table(
        "",
        *(Column(name, justify="right") for name in names.values()),
        title=f"{len(answers)} answers of at most {limit} tokens, one at a time;\n"
        f"{key.draft} drafts of {key.k} tokens",
    )
    for title, (figure, form) in FIGURES.items():
        values = map(figure, measured)
        table.add_row(title, *("-" if value is None else format(value, form) for value in values))
    equal = (
        f"{sum(map(_agrees, _judged(found[method]).values()))} of {len(answers)}"
        for method in ("standard", "mars")
    )
    table.add_row("equal to autoregressive", "-", *equal)
    return table


def _speed_table(found: dict[str, Row]) -> Table:
    table = Table(
        "",
        *(Column(name, justify="right") for name in ("per further token", "per answer")),
        title="How many times as fast",
        caption="per further token the median over prompts of the ratio of times, per answer the "
        "ratio of the mean times; 95 % intervals of a bootstrap over prompts",
    )
    for method, other in PAIRS:
        it = beside(found[method], found[other])
        pair = f"{LABELS[method]} / {LABELS[other]}"
        table.add_row(pair, _interval(it.faster), _interval(it.sooner))
    return table


def _interval(found: Interval | None) -> str:
    return "-" if found is None else f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def _print_kinds(found: dict[str, Row], kinds: Mapping[str, str], console: Console) -> None:
    """Names the kinds of prompt for which MARS gains most and least."""
    gains = {}
    for kind in sorted(set(kinds.values())):
        names = {name for name, of in kinds.items() if of == kind}
        gain = beside(*(_answers(found[method], names) for method in ("mars", "standard"))).faster
        if gain is not None:
            gains[kind or "(no category)"] = gain.value
    named = [f"{kind} {gains[kind]:.2f}" for kind in sorted(gains, key=lambda it: -gains[it])]
    text = "MARS / strict per further token"
    if len(named) > 2 * MAX_KINDS:
        most, least = ", ".join(named[:MAX_KINDS]), ", ".join(named[-MAX_KINDS:])
        console.print(f"{text}, of {len(named)} kinds of prompt: most {most}; least {least}")
    elif named:
        console.print(f"{text}: {', '.join(named)}")


def _answers(row: Row, prompts: set[str]) -> Row:
    """A row with the answers to some prompts alone."""

    def some(cell: Cell) -> Cell:
        return replace(cell, outputs=tuple(it for it in cell.outputs if it.prompt_id in prompts))

    return replace(row, cells=tuple(map(some, row.cells)))


def _print_lengths(found: dict[str, Row], console: Console) -> None:
    strict, mars = (_first_pass(found[method]) for method in ("standard", "mars"))
    lengths = {name: (strict[name].output_tokens, mars[name].output_tokens) for name in mars}
    changed = [name for name, (before, after) in lengths.items() if before != after]
    changed.sort(key=lambda name: -abs(lengths[name][1] - lengths[name][0]))
    text = f"{len(changed)} of {len(mars)} answers changed length"
    if changed:
        listed = [f"{it} {lengths[it][0]} -> {lengths[it][1]}" for it in changed[:MAX_LENGTHS]]
        more = len(changed) - len(listed)
        text += " (tokens, strict -> MARS): " + ", ".join(listed)
        text += f" and {more} more, in the result file" if more else ""
    console.print(text)


def _print_example(output: Output, quality: PromptQuality, console: Console) -> None:
    """One answer with its relaxed tokens, each beside the target's first choice."""
    marked, end = Text(), 0
    in_colour = console.is_terminal and not console.no_color
    for token in quality.off_choice:
        text = output.text[token.start : token.end]
        marked.append(output.text[end : token.start])
        marked.append(text if in_colour else f"[{text}]", RELAXED_STYLE if in_colour else None)
        end = token.end
    marked.append(output.text[end:])
    title = f"MARS answer to {output.prompt_id}: relaxed tokens marked"
    console.print(Panel(marked, title=title))
    p = Column("p", justify="right")
    names = ("relaxed token", p, "target's first choice", p.copy())
    table = Table(*names, title="What the target would have said there")
    for token in quality.off_choice[:MAX_LISTED]:
        table.add_row(
            Text(repr(token.text)),
            f"{math.exp(token.logprob):.2f}",
            Text(repr(token.best_text)),
            f"{math.exp(token.best_logprob):.2f}",
        )
    if len(quality.off_choice) > MAX_LISTED:
        table.caption = f"and {len(quality.off_choice) - MAX_LISTED} more"
    console.print(table)
