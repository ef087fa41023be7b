"""The demo's report for the terminal."""

import math
from collections.abc import Callable

from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from vllm_mars.demo.results import PAIRS, Example, Record, Results, Speedup

RELAXED_STYLE = "bold black on yellow"
WARNING_STYLE = "bold red"
MAX_LISTED = 12
# Kinds of prompt named at either end, and answers whose length changed most.
MAX_KINDS = 3
MAX_LENGTHS = 6
LABELS = {"autoregressive": "autoregressive", "strict": "strict", "mars": "MARS"}
# Name and form of what `Results.summary` gives; a mode may lack it.
FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "ms to first token (median)": ("ttft_seconds", lambda seconds: f"{1000 * seconds:.1f}"),
    "ms per further token (median)": ("tpot_seconds", lambda seconds: f"{1000 * seconds:.1f}"),
    "seconds per answer": ("seconds_per_answer", "{:.2f}".format),
    "tokens/s": ("tokens_per_second", "{:.1f}".format),
    "mean acceptance length": ("mean_acceptance_length", "{:.2f}".format),
    "tokens per answer": ("tokens_per_answer", "{:.1f}".format),
    "relaxed tokens": ("relaxed_share", "{:.1%}".format),
    "nats lost per token": ("loss_nats_per_token", "{:.3f}".format),
}


def print_report(results: Results, console: Console) -> None:
    """Prints the comparison and one answer with its relaxed tokens marked or in brackets."""
    console.print(_figures_table(results))
    console.print(_speedup_table(results))
    _print_kinds(results.kinds(), console)
    _print_lengths(results.changed_lengths(), len(results.first_pass("mars")), console)
    comparison = results.comparison()
    if comparison["strict_text_equals_autoregressive"]:
        console.print("The strict answers equal the autoregressive ones, character for character.")
    else:
        console.print(
            "The strict answers differ from the autoregressive ones at: "
            + ", ".join(comparison["differing_prompts"]),
            style=WARNING_STYLE,
        )
    if results.example is not None:
        _print_example(results.example, console)
    else:
        console.print("No token was relaxed in any answer.")
    if results.options.short:
        console.print("This short form shows that it works, not how fast: leave out --short.")


def _figures_table(results: Results) -> Table:
    options = results.options
    figures = {mode: results.summary(mode) for mode in LABELS}
    mars = figures["mars"]
    count = len(results.first_pass("mars"))
    names = {**LABELS, "mars": f"{LABELS['mars']}, {options.rule_name}"}
    table = Table(
        "",
        *(Column(name, justify="right") for name in names.values()),
        title=f"{count} answers of at most {options.max_tokens} tokens, one at a time;\n"
        f"{options.draft_name} drafts of {options.num_speculative_tokens} tokens",
        caption=f"relaxed: {mars['relaxed_tokens']} of {mars['output_tokens']} output tokens; "
        f"{mars['verified_tokens']} draft tokens verified",
    )
    for title, (name, form) in FIGURES.items():
        values = [figures[mode].get(name) for mode in LABELS]
        table.add_row(title, *("-" if value is None else form(value) for value in values))
    equal = (f"{figures[mode]['equal_answers']} of {count}" for mode in ("strict", "mars"))
    table.add_row("equal to autoregressive", "-", *equal)
    return table


def _speedup_table(results: Results) -> Table:
    table = Table(
        "",
        *(Column(name, justify="right") for name in ("per further token", "per answer")),
        title="How many times as fast",
        caption="median over prompts of the ratio of times, and its 95 % interval (bootstrap)",
    )
    for mode, other in PAIRS:
        found = results.speedups(mode, other)
        pair = f"{LABELS[mode]} / {other}"
        table.add_row(pair, _interval(found["tpot"]), _interval(found["seconds"]))
    return table


def _interval(found: Speedup | None) -> str:
    if found is None:
        return "-"
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def _print_kinds(kinds: dict[str, float], console: Console) -> None:
    named = [f"{kind} {ratio:.2f}" for kind, ratio in kinds.items()]
    if len(named) <= 2 * MAX_KINDS:
        console.print("MARS / strict per further token: " + ", ".join(named))
        return
    console.print(
        f"MARS / strict per further token, of {len(named)} kinds of prompt: "
        f"most {', '.join(named[:MAX_KINDS])}; least {', '.join(named[-MAX_KINDS:])}"
    )


def _print_lengths(changed: list[tuple[Record, Record]], count: int, console: Console) -> None:
    text = f"{len(changed)} of {count} answers changed length"
    if changed:
        listed = [
            f"{strict.prompt.id} {strict.answer.output_tokens} -> {mars.answer.output_tokens}"
            for strict, mars in changed[:MAX_LENGTHS]
        ]
        more = len(changed) - len(listed)
        text += " (tokens, strict -> MARS): " + ", ".join(listed)
        text += f" and {more} more, in the result file" if more else ""
    console.print(text)


def _print_example(example: Example, console: Console) -> None:
    answer, in_colour = Text(), console.is_terminal and not console.no_color
    for token in example.tokens:
        style = RELAXED_STYLE if token.relaxed and in_colour else None
        answer.append(f"[{token.text}]" if token.relaxed and not in_colour else token.text, style)
    record = example.record
    console.print(Panel(answer, title=f"MARS answer to {record.prompt.id}: relaxed tokens marked"))
    if example.text != record.answer.text:
        console.print(
            "Asked again for its probabilities, the MARS server gave another text than the timed "
            "one; this is the second.",
            style=WARNING_STYLE,
        )

    p = Column("p", justify="right")
    names = ("relaxed token", p, "target's first choice", p.copy())
    table = Table(*names, title="What the target would have said there")
    relaxed = [token for token in example.tokens if token.relaxed]
    for token in relaxed[:MAX_LISTED]:
        table.add_row(
            Text(repr(token.text)),
            f"{math.exp(token.logprob):.2f}",
            Text(repr(token.best_text)),
            f"{math.exp(token.best_logprob):.2f}",
        )
    if len(relaxed) > MAX_LISTED:
        table.caption = f"and {len(relaxed) - MAX_LISTED} more"
    console.print(table)
