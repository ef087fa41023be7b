"""The rule once more, in pure Python, written from its definition and from nothing else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class Verified:
    """Tokens that one request emits, and how many of its drafts were accepted and relaxed."""

    tokens: list[int]
    accepted: int
    relaxed: int


def argmax(row: Sequence[float]) -> int:
    """First NaN if there is one, else the lowest id of the largest logit."""
    for token, logit in enumerate(row):
        if math.isnan(logit):
            return token
    return row.index(max(row))


def is_relaxed(
    row: Sequence[float], draft: int, theta: float, gap: float, protected: frozenset[int]
) -> bool:
    """Whether the margin accepts the draft token, the argmax included."""
    if not 0 <= draft < len(row) or any(math.isnan(logit) for logit in row) or len(row) < 2:
        return False
    first, second = sorted(row, reverse=True)[:2]
    if row[draft] < second or second == -math.inf:
        return False
    if draft in protected or argmax(row) in protected:
        return False
    if np.float32(theta) != 1 and not first > 0:
        return False
    with np.errstate(all="ignore"):
        scaled = np.float32(np.float32(theta) * np.float32(first))
        return bool(np.float32(second) > np.float32(scaled - np.float32(gap)))


def verify(
    rows: Sequence[Sequence[float]],
    drafts: Sequence[int],
    bonus: int | None,
    theta: float,
    gap: float,
    protected: frozenset[int],
) -> Verified:
    """Greedy verification of one request."""
    tokens: list[int] = []
    relaxed = 0
    for row, draft in zip(rows, drafts, strict=True):
        first_choice = argmax(row)
        if draft != first_choice:
            if not is_relaxed(row, draft, theta, gap, protected):
                return Verified([*tokens, first_choice], len(tokens), relaxed)
            relaxed += 1
        tokens.append(draft)
    accepted = len(tokens)
    return Verified(tokens if bonus is None else [*tokens, bonus], accepted, relaxed)
