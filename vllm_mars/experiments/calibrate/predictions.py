"""What thresholds would cost, predicted from one strict pass that recorded the drafts."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_mars.config import STRICT, Threshold
from vllm_mars.experiments.calibrate.simulate import Steps, simulate
from vllm_mars.local import intervals

BOOTSTRAP_SAMPLES = 2000
CONFIDENCE = 0.9
# From loose to strict; finer where large logits make a small step a large one.
# Metric -> first value, step and number of values of each part.
_PARTS = {
    "ratio": ((0.3, 0.02, 25), (0.8, 0.005, 36), (0.98, 0.002, 11)),
    "gap": ((4, -0.1, 30), (1, -0.02, 51)),
    "price": ((2, -0.05, 20), (1, -0.02, 40), (0.2, -0.005, 41)),
}
GRIDS = {
    metric: [round(first + step * i, 3) for first, step, count in parts for i in range(count)]
    for metric, parts in _PARTS.items()
}
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """What a threshold would do, by simulation; per token means per output token.

    Attributes:
        threshold: what the metric compares with.
        cost: predicted cost of the relaxed tokens, nats per token.
        high: 90th percentile of its bootstrap samples.
        relaxed: relaxed tokens per token.
        acceptance_length: mean tokens per step with drafts.
    """

    threshold: float
    cost: float
    high: float
    relaxed: float
    acceptance_length: float


def point(steps: Steps, strict_tokens: Floats, threshold: float, metric: str) -> Point:
    """Simulates one threshold.

    Args:
        steps: the recorded drafts, grouped by prompt.
        strict_tokens: `[groups]`, tokens of each prompt's strict answers.
        threshold: what the metric compares with.
        metric: "ratio", "gap" or "price".
    """
    groups = len(strict_tokens)
    outcome = simulate(steps, Threshold.of(metric, threshold))
    strict = simulate(steps, STRICT)
    # Steps without drafts, which are not recorded, emit the same under every threshold.
    more = np.bincount(steps.group, outcome.accepted - strict.accepted, groups)
    cost = np.bincount(steps.group, outcome.cost, groups)
    tokens = strict_tokens + more
    chosen = resamples(groups)
    samples = cost[chosen].sum(1) / tokens[chosen].sum(1)
    return Point(
        threshold=threshold,
        cost=float(cost.sum() / tokens.sum()),
        high=float(np.quantile(samples, CONFIDENCE)),
        relaxed=float(outcome.relaxed.sum() / tokens.sum()),
        acceptance_length=float(1 + outcome.accepted.mean()),
    )


def resamples(groups: int) -> NDArray[np.int64]:
    """`[BOOTSTRAP_SAMPLES, groups]` groups, drawn with replacement, the same each time."""
    return intervals.resamples(groups, BOOTSTRAP_SAMPLES)


def margins(steps: Steps, bins: int = 50) -> dict[str, Any]:
    """Histograms of z2 / z1 over the positions that strict verification reaches, for the report.

    Returns:
        `edges`, and of each bin the `positions`, those whose draft is the `runner_up` and not the
        first choice, and `probability_ratio`, the mean of p2 / p1 (None for an empty bin).
        Positions with z1 <= 0 are `not_positive`.
    """
    stop = steps.start + simulate(steps, STRICT).accepted
    reached = np.arange(len(steps.step)) <= stop[steps.step]
    positive = reached & (steps.first_logit > 0)
    ratio = steps.second_logit[positive].astype(float) / steps.first_logit[positive]
    runner_up = steps.may_relax[positive]
    probability = np.exp((steps.second_logit - steps.first_logit)[positive].astype(float))
    edges = np.linspace(0, 1, bins + 1)
    ratio = np.clip(ratio, 0, 1)
    positions, _ = np.histogram(ratio, edges)
    runners_up, _ = np.histogram(ratio[runner_up], edges)
    sums, _ = np.histogram(ratio, edges, weights=probability)
    return {
        "edges": [round(float(edge), 4) for edge in edges],
        "positions": positions.tolist(),
        "runner_up": runners_up.tolist(),
        "probability_ratio": [
            float(total / count) if count else None
            for total, count in zip(sums, positions, strict=True)
        ],
        "not_positive": int((reached & ~positive).sum()),
    }
