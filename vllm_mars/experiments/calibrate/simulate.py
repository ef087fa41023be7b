"""What other thresholds would do to recorded drafts, and cost, predicted without the model.

A strict run has looked at every draft token of every step, those behind the first rejection too:
their logits are the target's after the drafts before them, which is what a looser rule would have
compared. So for each recorded step it is exact what a threshold accepts and what that costs. Only
the next steps differ: they would start elsewhere. Their average is taken to be that of the strict
run, and an online run has to confirm it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_mars.config import STRICT, Threshold
from vllm_mars.experiments.calibrate.recording import FIELDS
from vllm_mars.kernels.cpu import keep_best_stop
from vllm_mars.kernels.terms import LOSS_BITS, MOST_LOSS, Verdict, price_units
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
resamples = partial(intervals.resamples, samples=BOOTSTRAP_SAMPLES)
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Steps:
    """Verified draft positions, ordered by step; arrays `[positions]` but for `group`.

    Attributes:
        group: `[steps]`, the group (such as the prompt) that each step belongs to.
        start: `[steps]`, index of the step's first position.
        step: index of each position's step.
        is_first: the draft token is the target's argmax.
        payable: it is another finite one, and no protected token stands against it.
        may_relax: it is payable, and the runner-up (or ties with it).
        first_logit, second_logit: the two largest logits, float32.
        loss: log p(argmax) - log p(draft) of a payable one, in units of 2**-LOSS_BITS nats.
        cost: the same of any, in nats.
    """

    group: Ints
    start: Ints
    step: Ints
    is_first: NDArray[np.bool_]
    payable: NDArray[np.bool_]
    may_relax: NDArray[np.bool_]
    first_logit: NDArray[np.float32]
    second_logit: NDArray[np.float32]
    loss: Ints
    cost: Floats


@dataclass(frozen=True)
class Outcome:
    """What one threshold makes of the steps; arrays `[steps]`.

    Attributes:
        accepted: accepted drafts.
        relaxed: those of them that only the margin accepted.
        cost: sum of the relaxed tokens' costs in nats.
    """

    accepted: Ints
    relaxed: Ints
    cost: Floats


def steps_of(
    records: Sequence[Sequence[Any]], group_of: dict[str, int], protected: Sequence[int]
) -> Steps:
    """Orders recorded positions for `simulate`.

    Args:
        records: rows of `recording.FIELDS`.
        group_of: the group of each request; records of other requests are left out.
        protected: tokens at which verification stays strict.

    Raises:
        ValueError: no record belongs to a group, so nothing can be simulated.
    """
    kept = sorted((row for row in records if row[0] in group_of), key=lambda row: (row[1], row[2]))
    if not kept:
        raise ValueError(
            "no draft token was verified, so there is nothing to simulate; take prompts or a draft "
            "that give drafts."
        )
    column = dict(zip(FIELDS, zip(*kept, strict=True), strict=True))
    _, start, step = np.unique(np.array(column["step"]), return_index=True, return_inverse=True)
    first, draft = np.array(column["first"]), np.array(column["draft"])
    first_logit = np.array(column["first_logit"], np.float32)
    second_logit = np.array(column["second_logit"], np.float32)
    draft_logit = np.array(column["draft_logit"], np.float32)
    blocked = np.isin(first, protected) | np.isin(draft, protected)
    is_first = draft == first
    # Outside the vocabulary the logit is -inf.
    payable = ~is_first & np.isfinite(draft_logit) & np.isfinite(first_logit) & ~blocked
    with np.errstate(invalid="ignore"):
        loss = np.ceil((first_logit - draft_logit) * np.float32(2**LOSS_BITS))
        cost = first_logit.astype(np.float64) - draft_logit
    return Steps(
        group=np.array([group_of[column["request"][index]] for index in start]),
        start=start,
        step=step,
        is_first=is_first,
        payable=payable,
        may_relax=payable & (draft_logit >= second_logit),
        first_logit=first_logit,
        second_logit=second_logit,
        loss=np.where(payable, np.minimum(loss, MOST_LOSS), 0).astype(np.int64),
        cost=cost,
    )


def simulate(steps: Steps, threshold: Threshold) -> Outcome:
    """Verifies the recorded drafts with a threshold.

    Args:
        steps: the recorded positions.
        threshold: with a price steps end at their best stop, else at the first rejection.
    """
    if threshold.price:
        relaxed = steps.payable
    else:
        # In float32 and in this order, as the samplers compare.
        limit = np.float32(threshold.theta) * steps.first_logit - np.float32(threshold.gap)
        relaxed = steps.may_relax & (steps.second_logit > limit)
        if threshold.theta < 1:
            relaxed &= steps.first_logit > 0
    verdicts = np.where(steps.is_first, Verdict.FIRST, relaxed * Verdict.RELAXED).astype(np.int8)
    index = np.arange(len(verdicts))
    end = np.append(steps.start[1:], len(index))
    if threshold.price:
        lengths = end - steps.start
        table = np.minimum(steps.start[:, None] + np.arange(lengths.max() + 1), len(index) - 1)
        keep_best_stop(verdicts, steps.loss, table, lengths, price_units(threshold.price))
    # The first rejection of each step, or the end of the step.
    rejected = np.where(verdicts != Verdict.NONE, len(index), index)
    stop = np.minimum(np.minimum.reduceat(rejected, steps.start), end)
    kept = (verdicts == Verdict.RELAXED) & (index < stop[steps.step])
    count = len(steps.start)
    # The cost of a draft outside the vocabulary is infinite, and never counts.
    cost = np.where(kept, steps.cost, 0.0)
    return Outcome(
        accepted=stop - steps.start,
        relaxed=np.bincount(steps.step, kept, count).astype(np.int64),
        cost=np.bincount(steps.step, cost, count).astype(np.float64),
    )


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
    """Predicts what a threshold does; `strict_tokens` are those of each group's strict answers."""
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


def margins(steps: Steps, bins: int = 50) -> dict[str, Any]:
    """Histograms of z2 / z1 over the positions that strict verification reaches.

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
