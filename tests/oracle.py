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
    loss: Fraction


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


def loss(row: Sequence[float], draft: int) -> Fraction:
    """Nats that the draft token loses against the first choice, in steps of 2**-16, rounded up."""
    if not 0 <= draft < len(row) or any(math.isnan(logit) for logit in row):
        return Fraction(0)
    with np.errstate(all="ignore"):
        nats = np.float32(max(row)) - np.float32(row[draft])
    if math.isnan(nats):
        return Fraction(0)
    return Fraction(math.ceil(min(float(nats), 2.0**14) * 2**16), 2**16)


def is_payable(row: Sequence[float], draft: int) -> bool:
    """Whether the draft token has a price at all."""
    is_token = 0 <= draft < len(row) and not any(math.isnan(logit) for logit in row)
    return is_token and row[draft] > -math.inf and max(row) < math.inf


def in_steps(price: float) -> Fraction:
    """A price in steps of 2**-16, rounded down."""
    return Fraction(math.floor(min(float(np.float32(price)), 2.0**13) * 2**16), 2**16)


@dataclass
class Nats:
    """No more than `rate` nats per output token and `burst`; `lost` with `produced` so far.

    The rate counts in steps of 2**-30, rounded down, and what has been earned in steps of 2**-16.
    """

    rate: Fraction
    burst: Fraction
    lost: Fraction
    produced: int


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
    nats: Nats | None = None,
    price: float | None = None,
    first_choice_counts: bool = True,
) -> list[Verdict]:
    """The verdict at each of a request's positions, each as if the ones before were accepted."""
    verdicts = []
    relaxed = budget.relaxed if budget else 0
    lost = nats.lost if nats else Fraction(0)
    for position, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
        verdict = Verdict.NONE
        if not first_choice_counts and draft == argmax(row):
            verdict = Verdict.FIRST
        elif price is not None:
            pays = loss(row, draft) < in_steps(price)
            if is_payable(row, draft) and (pays or not first_choice_counts):
                verdict = Verdict.RELAXED
                if draft in protected or argmax(row) in protected:
                    verdict = Verdict.PROTECTED if pays else Verdict.NONE
                if blocked is not None and blocked[position]:
                    verdict = Verdict(blocked[position]) if pays else Verdict.NONE
        else:
            if is_relaxed(row, draft, theta, gap, protected):
                verdict = Verdict.RELAXED
            elif is_relaxed(row, draft, theta, gap, frozenset()):
                verdict = Verdict.PROTECTED
            if verdict and blocked is not None and blocked[position]:
                verdict = Verdict(blocked[position])
        if verdict == Verdict.RELAXED:
            if budget and relaxed + 1 > budget.share * (budget.produced + position + 1):
                verdict = Verdict.BUDGET
            elif nats and lost + loss(row, draft) > earned(nats, position + 1):
                verdict = Verdict.LOSS
            else:
                relaxed += 1
                lost += loss(row, draft)
        verdicts.append(verdict)
    if price is not None and not first_choice_counts:
        stop = best_stop(rows, drafts, verdicts, in_steps(price))
        for position in range(stop, len(drafts)):
            if verdicts[position] == Verdict.RELAXED:
                verdicts[position] = Verdict.NONE
    return verdicts


def earned(nats: Nats, tokens: int) -> Fraction:
    """What the request may have lost by the end of so many tokens of this step."""
    rate = Fraction(math.floor(nats.rate * 2**30), 2**30)
    steps = math.floor(rate * (nats.produced + tokens) * 2**16)
    return Fraction(steps, 2**16) + nats.burst


def best_stop(
    rows: Sequence[Sequence[float]],
    drafts: Sequence[int],
    verdicts: Sequence[Verdict],
    price: Fraction,
) -> int:
    """Of all places where the step may end, the first that is worth most."""
    stops = []
    for stop in range(len(drafts) + 1):
        before = range(stop)
        if any(verdicts[i] not in (Verdict.FIRST, Verdict.RELAXED) for i in before):
            break
        if stop == len(drafts) or verdicts[stop] != Verdict.FIRST:
            paid = sum(loss(rows[i], drafts[i]) for i in before if verdicts[i] == Verdict.RELAXED)
            stops.append((paid - price * stop, stop))
    return min(stops)[1]


def verify(
    rows: Sequence[Sequence[float]],
    drafts: Sequence[int],
    bonus: int | None,
    theta: float,
    gap: float,
    protected: frozenset[int],
    blocked: Sequence[int] | None = None,
    budget: Budget | None = None,
    nats: Nats | None = None,
    price: float | None = None,
    dry_run: bool = False,
) -> Verified:
    """Greedy verification of one request."""
    limits = blocked, budget, nats, price
    verdicts = judge(rows, drafts, theta, gap, protected, *limits, first_choice_counts=False)
    tokens: list[int] = []
    relaxed, lost = 0, Fraction(0)
    for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
        first_choice = argmax(row)
        if draft != first_choice:
            if dry_run or verdict != Verdict.RELAXED:
                return Verified([*tokens, first_choice], len(tokens), relaxed, verdicts, lost)
            relaxed += 1
            lost += loss(row, draft)
        tokens.append(draft)
    emitted = tokens if bonus is None else [*tokens, bonus]
    return Verified(emitted, len(tokens), relaxed, verdicts, lost)
