"""What `vllm-mars calibrate` prints."""

from rich.console import Console
from rich.table import Column, Table

from vllm_mars.config import OPTION
from vllm_mars.experiments.calibrate.losses import Measure
from vllm_mars.experiments.calibrate.search import Calibration

MAX_ROWS = 14
# Held-out prompts below which a warning is printed.
FEW_PROMPTS = 30


def print_calibration(result: Calibration, console: Console) -> None:
    """Prints the predicted curve, the confirmations and the threshold that came out."""
    console.print(_curve(result))
    if result.confirmations:
        console.print(_confirmations(result))
    options, held_out = result.options, result.samples["held_out_prompts"] or 0
    option = OPTION[options.metric]
    if options.recovery is None:
        budget, larger = f"the budget of {options.budget:g} nats per token", "a larger --budget"
    else:
        budget, larger = f"{options.recovery:.4g} of the task score", "a smaller --recovery"
        console.print(
            f"Strict decoding solves {result.samples['solved_prompts']} of the {held_out} held-out "
            "tasks; recovery is measured on these alone."
        )
    if result.confirmed is not None:
        console.print(
            f"{option} {result.threshold:g} keeps {budget} in {result.confirmed.kept_share:.0%} of "
            f"the bootstrap samples over {held_out} held-out prompts."
        )
    else:
        console.print(
            f"No {option} short of strict keeps {budget} on {held_out} held-out prompts; "
            f"{option} is {result.threshold:g}, strict. More prompts or {larger} may give one.",
            style="bold",
        )
    if held_out < FEW_PROMPTS:
        console.print(
            f"{held_out} held-out prompts are few: others may lose much more. Give a file of 100 "
            "or more prompts like those that will be asked (--prompts).",
            style="bold",
        )
    metric = "" if options.metric == "ratio" else f'"mars_metric": "{options.metric}", '
    console.print(f'Serve with {metric}"{option}": "auto:{options.output}".', soft_wrap=True)


def _curve(result: Calibration) -> Table:
    of = result.samples
    samples = f"{of['recorded_positions']} positions in {of['recorded_tokens']} tokens"
    names = (OPTION[result.options.metric], "cost", "90 %", "relaxed", "acceptance length")
    table = Table(
        *(Column(name, justify="right") for name in names),
        title=f"Predicted from one strict pass: {samples} of {of['recorded_prompts']} prompts",
        caption="cost: what the relaxed tokens' log p lacks to the target's first choice, nats per "
        "token, beside the 90th percentile of its bootstrap samples",
    )
    curve = result.curve
    shown = {round(i * (len(curve) - 1) / (MAX_ROWS - 1)) for i in range(MAX_ROWS)}
    tried = {item.threshold for item in result.confirmations} | {result.threshold}
    for index, point in enumerate(curve):
        if index not in shown and point.threshold not in tried:
            continue
        table.add_row(
            f"{point.threshold:g}",
            f"{point.cost:.4f}",
            f"{point.high:.4f}",
            f"{point.relaxed:.2%}",
            f"{point.acceptance_length:.2f}",
            style="bold" if point.threshold == result.threshold else None,
        )
    return table


def _confirmations(result: Calibration) -> Table:
    option, tasks = OPTION[result.options.metric], result.options.recovery is not None
    held_out = result.samples["held_out_prompts"]
    names = (option, "predicted", "cost", "NLL", *(["recovery"] if tasks else []))
    table = Table(
        *(Column(name, justify="right") for name in (*names, "relaxed", "kept")),
        title=f"Measured on {held_out} held-out prompts, against strict decoding",
        caption="cost as above, NLL: increase of the answers' mean NLL per token, both with their "
        "95 % interval; recovery: task score / strict task score; kept: share of bootstrap samples "
        "within the budget",
    )
    for item in result.confirmations:
        table.add_row(
            f"{item.threshold:g}",
            f"{item.predicted:.4f}",
            _measure(item.cost),
            _measure(item.nll_increase),
            *(() if item.recovery is None else (_measure(item.recovery, ".3f"),)),
            f"{item.relaxed:.2%}",
            f"{item.kept_share:.0%}",
        )
    return table


def _measure(measure: Measure, form: str = "+.4f") -> str:
    return f"{measure.value:{form}} [{measure.low:{form}}, {measure.high:{form}}]"
