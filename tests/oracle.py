"""The rule once more, in pure Python, written from its definition and from nothing else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from vllm_mars.kernels.terms import Verdict


@dataclass
class Verified:
    """Tokens that one request emits, and how many of its drafts were accepted and relaxed."""

    tokens: list[int]
    accepted: int
    relaxed: int
    verdicts: list[Verdict]


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


@dataclass
class Budget:
    """No more than `share` of a request's output tokens, `relaxed` of `produced` so far."""

    share: Fraction
    relaxed: int
    produced: int


def judge(
    rows: Sequence[Sequence[float]],
    drafts: Sequence[int],
    theta: float,
    gap: float,
    protected: frozenset[int],
    blocked: Sequence[int] | None = None,
    budget: Budget | None = None,
    first_choice_counts: bool = True,
) -> list[Verdict]:
    """The verdict at each of a request's positions, each as if the ones before were accepted."""
    verdicts = []
    relaxed = budget.relaxed if budget else 0
    for position, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
        verdict = Verdict.NONE
        if not first_choice_counts and draft == argmax(row):
            verdict = Verdict.FIRST
        else:
            if is_relaxed(row, draft, theta, gap, protected):
                verdict = Verdict.RELAXED
            elif is_relaxed(row, draft, theta, gap, frozenset()):
                verdict = Verdict.PROTECTED
            if verdict and blocked is not None and blocked[position]:
                verdict = Verdict(blocked[position])
        if verdict == Verdict.RELAXED and budget:
            if relaxed + 1 <= budget.share * (budget.produced + position + 1):
                relaxed += 1
            else:
                verdict = Verdict.BUDGET
        verdicts.append(verdict)
    return verdicts


def verify(
    rows: Sequence[Sequence[float]],
    drafts: Sequence[int],
    bonus: int | None,
    theta: float,
    gap: float,
    protected: frozenset[int],
    blocked: Sequence[int] | None = None,
    budget: Budget | None = None,
    dry_run: bool = False,
) -> Verified:
    """Greedy verification of one request."""
    verdicts = judge(
        rows, drafts, theta, gap, protected, blocked, budget, first_choice_counts=False
    )
    tokens: list[int] = []
    relaxed = 0
    for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
        first_choice = argmax(row)
        if draft != first_choice:
            if dry_run or verdict != Verdict.RELAXED:
                return Verified([*tokens, first_choice], len(tokens), relaxed, verdicts)
            relaxed += 1
        tokens.append(draft)
    emitted = tokens if bonus is None else [*tokens, bonus]
    return Verified(emitted, len(tokens), relaxed, verdicts)
