"""How long a draft should be: the speed of each rule by the number of draft tokens, from a sweep.

    vllm-mars sweep --num-speculative-tokens 1 2 3 4 --concurrency 1 8 --output LENGTH.jsonl ...
    python -m benchmarks.draft_length LENGTH.jsonl --output LENGTH.json --plot LENGTH.png

The peak is the number of draft tokens, K, with the least median time per further token. Its 95 %
interval is that of the peaks of resamples of the prompts. It covers other prompts, not a machine
that changes its speed while the lengths are measured one after the other.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_mars.experiments.sweep.measured import TPOT, Measured, by_answer, measure
from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.summary import Row, rows
from vllm_mars.local.intervals import COVERAGE, resamples
from vllm_mars.local.result_file import write_json

Curves = list[dict[str, Any]]


def curves(found: Sequence[Row]) -> Curves:
    """The rules of each draft at each point of the grid, by K.

    Returns:
        An entry for each, with the figures `by_k` and their `peak`. A lossy rule is compared with
        what is strict at its K.

    Raises:
        ValueError: a K of a curve has no prompt in common with the others.
    """
    names = ("draft", "dataset", "temperature", "concurrency", "rule")
    points: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        if row.key.k and row.cells:
            of = tuple(getattr(row.key, name) for name in (*names[:-1], "k"))
            points.setdefault(of, []).append(row)
    by_rule: dict[tuple[Any, ...], dict[int, Measured]] = {}
    for measured in itertools.chain.from_iterable(map(measure, points.values())):
        key = measured.row.key
        of = tuple(getattr(key, name) for name in names)
        by_rule.setdefault(of, {})[key.k] = measured
    return [
        {
            **dict(zip(names, of, strict=True)),
            "peak": peak({k: measured.row for k, measured in curve.items()}),
            "by_k": [_figures(k, curve[k]) for k in sorted(curve)],
        }
        for of, curve in by_rule.items()
    ]


def _figures(k: int, measured: Measured) -> dict[str, Any]:
    compared = measured.faster if measured.row.key.lossy else None
    return {
        **{"k": k, "acceptance_length": measured.row.acceptance_length, **measured.times},
        "strict_tpot_over_tpot": compared and compared._asdict(),
        "tokens_per_answer": measured.length and measured.length._asdict(),
    }


def peak(curve: dict[int, Row]) -> dict[str, int]:
    """The K with the least median TPOT, as `value`, `low` and `high`."""
    lengths = np.array(sorted(curve))
    times: list[dict[str, float]] = []
    for k in lengths:
        by_prompt: dict[str, list[float]] = {}
        for (_, prompt), known in by_answer(curve[k]).items():
            by_prompt.setdefault(prompt, []).append(known[TPOT])
        times.append({prompt: float(np.mean(repeats)) for prompt, repeats in by_prompt.items()})
    prompts = [
        prompt
        for prompt in times[0]
        # An answer of one token has no time per further token.
        if all(not np.isnan(of.get(prompt, np.nan)) for of in times)
    ]
    if not prompts:
        raise ValueError(f"K {', '.join(map(str, lengths))} have no prompt in common; sweep again.")
    seconds = np.array([[of[prompt] for prompt in prompts] for of in times])
    medians = np.median(seconds[:, resamples(len(prompts))], axis=2)
    outside = (100 - COVERAGE) / 2
    peaks = lengths[medians.argmin(axis=0)]
    low, high = np.percentile(peaks, [outside, 100 - outside], method="nearest")
    best = lengths[np.median(seconds, axis=1).argmin()]
    return {"value": int(best), "low": int(low), "high": int(high)}


def plot(found: Curves, path: Path) -> None:
    """Draws TPOT by K, with a row per draft and a column per concurrency; peaks are larger."""
    # Only plots need it.
    from matplotlib.figure import Figure

    drafts = list(dict.fromkeys(curve["draft"] for curve in found))
    loads = sorted({curve["concurrency"] for curve in found})
    figure = Figure(figsize=(5.5 * len(loads), 4 * len(drafts)), layout="constrained")
    grid = figure.subplots(len(drafts), len(loads), squeeze=False)
    rules = list(dict.fromkeys(curve["rule"] for curve in found))
    for curve in found:
        axes = grid[drafts.index(curve["draft"])][loads.index(curve["concurrency"])]
        of_k = curve["by_k"]
        ends = [
            [1000 * of["tpot_seconds"][name] for of in of_k] for name in ("value", "low", "high")
        ]
        lengths, (value, low, high) = [of["k"] for of in of_k], np.array(ends)
        color = f"C{rules.index(curve['rule'])}"
        axes.errorbar(
            lengths,
            value,
            (value - low, high - value),
            color=color,
            marker="o",
            label=curve["rule"],
        )
        best = lengths.index(curve["peak"]["value"])
        axes.plot(lengths[best], value[best], color=color, marker="o", markersize=11)
        at_once = f"{curve['concurrency']} at once"
        axes.set(
            title=f"{curve['draft']}, {at_once}",
            xlabel="draft tokens per step, K",
            ylabel="ms per further token",
            xticks=lengths,
        )
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Calculates; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sweep", type=Path, nargs="+", help="files of `vllm-mars sweep`")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--plot", type=Path, help="PNG file")
    args = parser.parse_args()
    cells = read_cells(args.sweep)
    found = curves(rows(cells))
    result = {
        "schema": "vllm-mars/draft-length/1",
        # Of the measurement: this command only calculates.
        **cells[0].origin,
        "sweep": [path.name for path in args.sweep],
        "curves": found,
    }
    write_json(args.output, result)
    if args.plot:
        plot(found, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
