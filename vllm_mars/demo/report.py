"""The demo's report for the terminal."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from vllm_mars.demo.run import Results, Scored

RELAXED_STYLE = "bold black on yellow"
MAX_LISTED = 12
LABELS = {"autoregressive": "autoregressive", "strict": "strict", "mars": "MARS, theta"}


def print_report(results: "Results", console: Console) -> None:
    """Prints the comparison and one answer with its relaxed tokens marked.

    Args:
        results: a finished run.
        console: where to print; without a terminal, relaxed tokens stand in brackets.
    """
    console.print(_comparison_table(results))
    comparison = results.comparison()
    if comparison["strict_text_equals_autoregressive"]:
        console.print("The strict answers equal the autoregressive ones, character for character.")
    else:
        console.print(
            "The strict answers differ from the autoregressive ones at: "
            + ", ".join(comparison["differing_prompts"]),
            style="bold red",
        )
    if not results.summary("mars")["second_pass_same_text"]:
        console.print(
            "The second pass on the MARS server gave other texts than the timed one; "
            "the relaxed tokens are counted in the second.",
            style="bold red",
        )
    _print_example(results.example(), console)


def _comparison_table(results: "Results") -> Table:
    options = results.options
    figures = {mode: results.summary(mode) for mode in LABELS}
    speed = {mode: figures[mode]["tokens_per_second"] for mode in LABELS}
    mars = figures["mars"]
    table = Table(
        title=f"{len(results.scored)} answers, {options.draft_name} drafts of "
        f"{options.num_speculative_tokens} tokens, one request at a time",
        caption=f"relaxed: {mars['relaxed_tokens']} of {mars['output_tokens']} output tokens; "
        f"{mars['verified_tokens']} draft tokens verified",
    )
    table.add_column("")
    for mode, label in LABELS.items():
        table.add_column(f"{label} {options.theta:g}" if mode == "mars" else label, justify="right")
    rows: dict[str, Callable[[str], str]] = {
        "tokens/s": lambda mode: f"{speed[mode]:.1f}",
        "  x autoregressive": lambda mode: f"{speed[mode] / speed['autoregressive']:.2f}",
        "  x strict": lambda mode: f"{speed[mode] / speed['strict']:.2f}",
        "mean acceptance length": lambda mode: f"{figures[mode]['mean_acceptance_length']:.2f}",
        "relaxed tokens": lambda mode: f"{mars['relaxed_share']:.1%}" if mode == "mars" else "-",
        "tokens per answer": lambda mode: f"{figures[mode]['tokens_per_answer']:.1f}",
        "seconds per answer": lambda mode: f"{figures[mode]['seconds_per_answer']:.2f}",
    }
    for name, value in rows.items():
        table.add_row(name, *(value(mode) for mode in LABELS))
    return table


def _print_example(scored: "Scored", console: Console) -> None:
    if scored.relaxed == 0:
        console.print("No token was relaxed in any answer.")
        return
    answer = Text()
    for token in scored.tokens:
        if not token.relaxed:
            answer.append(token.text)
        elif console.is_terminal and not console.no_color:
            answer.append(token.text, style=RELAXED_STYLE)
        else:
            answer.append(f"[{token.text}]")
    prompt = scored.record.prompt
    console.print(Panel(answer, title=f"MARS answer to {prompt.id}: relaxed tokens marked"))

    table = Table(title="What the target would have said there")
    table.add_column("relaxed token")
    table.add_column("p", justify="right")
    table.add_column("target's first choice")
    table.add_column("p", justify="right")
    relaxed = [token for token in scored.tokens if token.relaxed]
    for token in relaxed[:MAX_LISTED]:
        table.add_row(
            Text(repr(token.text)),
            f"{math.exp(token.logprob):.2f}",
            Text(repr(token.best_text)),
            f"{math.exp(token.best_logprob):.2f}",
        )
    if len(relaxed) > MAX_LISTED:
        table.caption = f"and {len(relaxed) - MAX_LISTED} more, in the result file"
    console.print(table)
