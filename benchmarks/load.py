"""How the gain of speculation shrinks as load grows: a model fitted to a sweep's cells.

`vllm-mars sweep --output sweep.jsonl --concurrency 1 4 16 ...` measures, and
`python -m benchmarks.load sweep.jsonl --output load.json` fits.

The model (docs/load.md): a step that verifies n tokens takes T(n) = floor + slope * n. B requests
need T(B) for B tokens without speculation, and with it T(B * width) plus the drafting for B * L
tokens: width is K + 1 where every step drafts K, L the acceptance length. So the gain is
L * T(B) / (T(B * width) + drafting).

floor and slope are fitted to the autoregressive cells alone, in which a request gains one token in
each step: T is the mean time of an answer's token and B the mean number of requests in flight,
prefill included in both. Of the other cells the prediction takes L and width only.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.records import Cell
from vllm_mars.experiments.sweep.summary import Row, rows
from vllm_mars.local.result_file import write_json


@dataclass(frozen=True)
class StepTime:
    """T(n) = floor + slope * n, the seconds of a step that verifies n tokens.

    Attributes:
        floor: seconds that do not depend on n: weights are read once, work is launched.
        slope: seconds for each token more.
    """

    floor: float
    slope: float

    def __call__(self, tokens: float) -> float:
        """Seconds of a step with this many tokens."""
        return self.floor + self.slope * tokens

    def gain(self, batch: float, length: float, width: float, drafting: float = 0.0) -> float:
        """Speed with speculation over speed without.

        Args:
            batch: requests in a step, B.
            length: acceptance length L, the tokens that a request gains per step.
            width: tokens that are verified per request and step: K + 1 where every step drafts
                K, less where a request has no draft.
            drafting: seconds that a step spends on drafting.
        """
        return length * self(batch) / (self(batch * width) + drafting)

    def break_even(self, length: float, width: float, drafting: float = 0.0) -> float:
        """The batch at which the gain falls to 1; infinite where it never does."""
        rejected = width - length
        saved = (length - 1) * self.floor - drafting
        if rejected <= 0 or self.slope <= 0:
            return float("inf") if saved > 0 else 0.0
        return max(0.0, saved / (self.slope * rejected))


def fit(points: Sequence[tuple[float, float]]) -> StepTime:
    """The line through (tokens, seconds) points with the least squares of relative errors."""
    tokens, seconds = np.array(points).T
    slope, floor = np.polyfit(tokens, seconds, 1, w=1 / seconds)
    return StepTime(float(floor), float(slope))


def summarise(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Fits the model at each model, dataset and temperature, and predicts the gains there.

    Returns:
        An entry for each point of the grid with autoregressive cells at two concurrencies or more:
        the fitted `step_time`, the `autoregressive_steps` that it was fitted to, and per rule and
        concurrency the measured and the predicted gain.

    Raises:
        ValueError: there is no such point.
    """
    by_point: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows(list(cells)):
        if row.tokens_per_second is not None:
            key = row.key
            by_point.setdefault((key.model, key.dataset, key.temperature), []).append(row)
    fits = []
    for (model, dataset, temperature), found in by_point.items():
        steps = {
            row.key.concurrency: _autoregressive(row)
            for row in found
            if row.key.method == "autoregressive"
        }
        if len(steps) < 2:
            continue
        step = fit(list(steps.values()))
        fits.append(
            {
                **{"model": model, "dataset": dataset, "temperature": temperature},
                "step_time": asdict(step),
                "autoregressive_steps": {
                    str(c): {"tokens": n, "seconds": t} for c, (n, t) in steps.items()
                },
                "cells": [
                    _predicted(row, step, steps[row.key.concurrency][0])
                    for row in found
                    if row.acceptance_length is not None and row.key.concurrency in steps
                ],
            }
        )
    if not fits:
        raise ValueError(
            "no model, dataset and temperature has autoregressive cells at two concurrencies or "
            "more, which a line needs; measure some with `vllm-mars sweep --concurrency 1 4 16`."
        )
    return fits


def _predicted(row: Row, step: StepTime, batch: float) -> dict[str, Any]:
    length, width = _speculative(row)
    return {
        **{"rule": row.key.rule, "draft": row.key.draft, "k": row.key.k},
        "concurrency": row.key.concurrency,
        **{"length": length, "width": width, "measured_gain": row.speedup},
        "predicted_gain": step.gain(batch, length, width),
        "break_even_batch": step.break_even(length, width),
    }


def _autoregressive(row: Row) -> tuple[float, float]:
    """Requests in flight and seconds of an answer's token, each the median over the repeats."""
    found = [
        (sum(output.seconds for output in cell.outputs), cell.speed)
        for cell in row.cells
        if cell.speed is not None
    ]
    return (
        statistics.median(busy / speed.seconds for busy, speed in found),
        statistics.median(busy / speed.output_tokens for busy, speed in found),
    )


def _speculative(row: Row) -> tuple[float, float]:
    """L and width, each the median over the repeats; an accepted draft saves a request a step."""
    found = [
        (cell.speed.output_tokens, cell.acceptance.accepted_tokens, cell.acceptance.draft_tokens)
        for cell in row.cells
        if cell.speed is not None and cell.acceptance is not None
    ]
    return (
        statistics.median(tokens / (tokens - accepted) for tokens, accepted, _ in found),
        statistics.median(1 + drafts / (tokens - accepted) for tokens, accepted, drafts in found),
    )


def main() -> int:
    """Fits; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sweep", type=Path, nargs="+", help="files of `vllm-mars sweep`")
    parser.add_argument("--output", type=Path, help="JSON file; default: standard output only")
    args = parser.parse_args()
    cells = read_cells(args.sweep)
    fits = summarise(cells)
    result = {
        "schema": "vllm-mars/load/2",
        # Of the measurement: this command only calculates.
        **cells[0].origin,
        "sweep": [path.name for path in args.sweep],
        "fits": fits,
    }
    if args.output:
        write_json(args.output, result)
    print(json.dumps(fits, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
