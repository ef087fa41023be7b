"""Applies other thresholds to recorded drafts, without the model.

A strict run has looked at every draft token of every step, those behind the first rejection too:
their logits are the target's after the drafts before them, which is what a looser rule would have
compared. So for each recorded step it is exact what a threshold accepts and what that costs. Only
the next steps differ: they would start elsewhere. Their average is taken to be that of the strict
run, and an online run has to confirm it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_mars.experiments.calibrate.recording import FIELDS

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
        may_relax: it is the runner-up (or ties with it), and no protected token stands against it.
        first_logit, second_logit: the two largest logits, float32.
        cost: log p(argmax) - log p(draft), nats.
    """

    group: Ints
    start: Ints
    step: Ints
    is_first: NDArray[np.bool_]
    may_relax: NDArray[np.bool_]
    first_logit: NDArray[np.float32]
    second_logit: NDArray[np.float32]
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
    numbers, start, step = np.unique(
        np.array(column["step"]), return_index=True, return_inverse=True
    )
    assert len(numbers) == len(start), "one start for each step"
    first, draft = np.array(column["first"]), np.array(column["draft"])
    first_logit = np.array(column["first_logit"], np.float32)
    second_logit = np.array(column["second_logit"], np.float32)
    draft_logit = np.array(column["draft_logit"], np.float32)
    blocked = np.isin(first, protected) | np.isin(draft, protected)
    return Steps(
        group=np.array([group_of[column["request"][index]] for index in start]),
        start=start,
        step=step,
        is_first=draft == first,
        may_relax=(draft_logit >= second_logit) & np.isfinite(second_logit) & ~blocked,
        first_logit=first_logit,
        second_logit=second_logit,
        cost=first_logit.astype(np.float64) - draft_logit,
    )


def relaxed_by(steps: Steps, theta: float, gap: float) -> NDArray[np.bool_]:
    """Marks the positions at which only the margin accepts the draft, were they reached.

    Args:
        steps: the recorded positions.
        theta: in (0, 1].
        gap: nats, >= 0; metric "gap" is theta 1.
    """
    # In float32 and in this order, as the samplers compare.
    limit = np.float32(theta) * steps.first_logit - np.float32(gap)
    relaxed: NDArray[np.bool_] = ~steps.is_first & steps.may_relax & (steps.second_logit > limit)
    if theta < 1:
        relaxed &= steps.first_logit > 0
    return relaxed


def simulate(steps: Steps, theta: float, gap: float = 0.0) -> Outcome:
    """Verifies the recorded drafts with a threshold.

    Args:
        steps: the recorded positions.
        theta: in (0, 1]; 1 with gap 0 is strict.
        gap: nats, >= 0; metric "gap" is theta 1.
    """
    relaxed = relaxed_by(steps, theta, gap)
    index = np.arange(len(relaxed))
    # The first rejection of each step, or the end of the step.
    end = np.append(steps.start[1:], len(index))
    rejected = np.where(steps.is_first | relaxed, len(index), index)
    stop = np.minimum(np.minimum.reduceat(rejected, steps.start), end)
    kept = relaxed & (index < stop[steps.step])
    count = len(steps.start)
    # The cost of a draft outside the vocabulary is infinite, and never counts.
    cost = np.where(kept, steps.cost, 0.0)
    return Outcome(
        accepted=stop - steps.start,
        relaxed=np.bincount(steps.step, kept, count).astype(np.int64),
        cost=np.bincount(steps.step, cost, count).astype(np.float64),
    )
