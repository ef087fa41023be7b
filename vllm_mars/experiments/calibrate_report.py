"""What `vllm-mars calibrate` prints."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from vllm_mars.calibration import OPTION

if TYPE_CHECKING:
    from vllm_mars.experiments.calibrate import Calibration, Measure

MAX_ROWS = 14


def print_calibration(result: "Calibration", console: Console) -> None:
    """Prints the predicted curve, the confirmations and the threshold that came out."""
    console.print(_curve(result))
    if result.confirmations:
        console.print(_confirmations(result))
    options = result.options
    option = OPTION[options.metric]
    kept = result.confirmations[-1] if result.confirmations else None
    if kept is not None and kept.kept:
        console.print(
            f"{option} {result.threshold:g} keeps the budget of {options.budget:g} nats per token "
            f"in {kept.kept_share:.0%} of the bootstrap samples over {result.prompts[1]} held-out "
            "prompts."
        )
    else:
        console.print(
            f"No {option} short of strict keeps the budget of {options.budget:g} nats per token on "
            f"{result.prompts[1]} held-out prompts; {option} is {result.threshold:g}, strict. More "
            "prompts or a larger --budget may give one.",
            style="bold",
        )
    console.print(f'Serve with "{option}": "auto:{options.output}".', soft_wrap=True)


def _curve(result: "Calibration") -> Table:
    samples = f"{result.recorded[1]} positions in {result.recorded[0]} tokens"
    table = Table(
        title=f"Predicted from one strict pass: {samples} of {result.prompts[0]} prompts",
        caption="cost: what the relaxed tokens' log p lacks to the target's first choice, nats per "
        "token, beside the 90th percentile of its bootstrap samples",
    )
    for name in (OPTION[result.options.metric], "cost", "90 %", "relaxed", "acceptance length"):
        table.add_column(name, justify="right")
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


def _confirmations(result: "Calibration") -> Table:
    table = Table(
        title=f"Measured on {result.prompts[1]} held-out prompts, against strict decoding",
        caption="cost as above, NLL: increase of the answers' mean NLL per token, both with their "
        "95 % interval; kept: share of bootstrap samples with both within the budget",
    )
    for name in (OPTION[result.options.metric], "predicted", "cost", "NLL", "relaxed", "kept"):
        table.add_column(name, justify="right")
    for item in result.confirmations:
        table.add_row(
            f"{item.threshold:g}",
            f"{item.predicted:.4f}",
            _measure(item.cost),
            _measure(item.nll_increase),
            f"{item.relaxed:.2%}",
            f"{item.kept_share:.0%}",
        )
    return table


def _measure(measure: "Measure") -> str:
    return f"{measure.value:+.4f} [{measure.low:+.4f}, {measure.high:+.4f}]"
