"""An independent implementation of the rule in pure Python, written only from its definition."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from vllm_mars.kernels.interface import Verdict


@dataclass
class Verified:
    """Output of a greedy request, with the number of accepted and of relaxed drafts."""

    tokens: list[int]
    accepted: int
    relaxed: int
    verdicts: list[Verdict]
    loss: Fraction


def argmax(row: Sequence[float]) -> int:
    """Id of the first NaN, or else the lowest id of the largest logit."""
    for token, logit in enumerate(row):
        if math.isnan(logit):
            return token
    return row.index(max(row))


def is_relaxed(row: Sequence[float], draft: int, theta: float, protected: frozenset[int]) -> bool:
    """Whether the margin accepts the draft token, which may be the argmax."""
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
        return bool(np.float32(second) > np.float32(np.float32(theta) * np.float32(first)))


def loss(row: Sequence[float], draft: int) -> Fraction:
    """Loss of the draft token against the argmax, in nats, rounded up to units of 2**-16."""
    if not 0 <= draft < len(row) or any(math.isnan(logit) for logit in row):
        return Fraction(0)
    with np.errstate(all="ignore"):
        nats = np.float32(max(row)) - np.float32(row[draft])
    if math.isnan(nats):
        return Fraction(0)
    return Fraction(math.ceil(min(float(nats), 2.0**14) * 2**16), 2**16)


def is_payable(row: Sequence[float], draft: int) -> bool:
    """Whether the loss of the draft token is finite."""
    is_token = 0 <= draft < len(row) and not any(math.isnan(logit) for logit in row)
    return is_token and row[draft] > -math.inf and max(row) < math.inf


def in_steps(price: float | Fraction) -> Fraction:
    """A price, rounded down to units of 2**-16."""
    if isinstance(price, Fraction):
        return price
    return Fraction(math.floor(min(float(np.float32(price)), 2.0**13) * 2**16), 2**16)


@dataclass
class Nats:
    """A budget of `rate` nats per output token plus 100 tokens, of which `lost` is spent.

    The rate is rounded down to units of 2**-30, and the budget to units of 2**-16.
    """

    rate: Fraction
    lost: Fraction
    produced: int


def judge(
    rows: Sequence[Sequence[float]],
    drafts: Sequence[int],
    theta: float = 1.0,
    protected: frozenset[int] = frozenset(),
    blocked: Sequence[int] | None = None,
    listed: Sequence[frozenset[int]] | None = None,
    nats: Nats | None = None,
    price: float | Fraction | None = None,
    ends: frozenset[int] = frozenset(),
    room: int | None = None,
) -> list[Verdict]:
    """Verdicts of a greedy request's positions.

    A listed draft token is relaxed only if the argmax is listed, too.

    Args:
        room: number of further output tokens that the request may have.
    """
    verdicts = []
    lost = nats.lost if nats else Fraction(0)
    protected, gainful = protected | ends, num_extendable(drafts, ends, room)
    for position, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
        verdict, reason = Verdict.NONE, blocked[position] if blocked is not None else 0
        if not reason and (draft in protected or argmax(row) in protected):
            reason = Verdict.PROTECTED
        if not reason and listed and draft in listed[position]:
            reason = 0 if argmax(row) in listed[position] else Verdict.REPEAT
        if price is None:
            pays = is_relaxed(row, draft, theta, frozenset())
        else:
            pays = is_payable(row, draft) and loss(row, draft) < in_steps(price)
            pays = pays and position < gainful
        if draft == argmax(row):
            verdict = Verdict.FIRST
        elif reason:
            verdict = Verdict(reason) if pays else Verdict.NONE
        elif pays or (
            price is not None and in_steps(price) and is_payable(row, draft) and position < gainful
        ):
            verdict = Verdict.PAYABLE
            if nats and lost + loss(row, draft) > earned(nats, position + 1):
                verdict = Verdict.LOSS
            else:
                lost += loss(row, draft)
        verdicts.append(verdict)
    paid = [i for i, verdict in enumerate(verdicts) if verdict == Verdict.PAYABLE]
    stop = len(drafts)
    if price is not None:
        stop = best_stop(rows, drafts, verdicts, in_steps(price), gainful)
    for i in paid:
        verdicts[i] = Verdict.RELAXED if i < stop else Verdict.NONE
    return verdicts


def repeats(before: Sequence[int], token: int, most: int = 4) -> int:
    """Length of the longest n-gram of `before` that the token would repeat; 0 for none."""
    longest = 0
    for n in range(2, most + 1):
        ngram = [*before[len(before) - n + 1 :], token]
        earlier = [[*before[start : start + n]] for start in range(len(before) - n + 1)]
        longest = n if len(ngram) == n and ngram in earlier else longest
    return longest


def num_extendable(drafts: Sequence[int], ends: frozenset[int], room: int | None) -> int:
    """Number of positions that a token of the answer can follow: `room`, and before an end."""
    before_end = [draft in ends for draft in [*drafts, *ends]].index(True) if ends else len(drafts)
    return min(before_end, len(drafts), len(drafts) if room is None else room)


def earned(nats: Nats, tokens: int) -> Fraction:
    """Budget of the request after `tokens` tokens of this step."""
    rate = Fraction(math.floor(nats.rate * 2**30), 2**30)
    return Fraction(math.floor(rate * (nats.produced + tokens + 100) * 2**16), 2**16)


def best_stop(
    rows: Sequence[Sequence[float]],
    drafts: Sequence[int],
    verdicts: Sequence[Verdict],
    price: Fraction,
    gainful: int,
) -> int:
    """First of the best positions at which the step can end."""
    stops = []
    for stop in range(len(drafts) + 1):
        before = range(stop)
        if any(verdicts[i] not in (Verdict.FIRST, Verdict.PAYABLE) for i in before):
            break
        if stop == len(drafts) or verdicts[stop] != Verdict.FIRST:
            paid = sum(loss(rows[i], drafts[i]) for i in before if verdicts[i] == Verdict.PAYABLE)
            stops.append((paid - price * min(stop, gainful), stop))
    return min(stops)[1]


def verify(
    rows: Sequence[Sequence[float]], drafts: Sequence[int], bonus: int | None, **rule: Any
) -> Verified:
    """Greedy verification of one request; `rule` holds arguments of `judge`.

    Relaxed tokens after the answer's last token do not count.
    """
    verdicts = judge(rows, drafts, **rule)
    gainful = num_extendable(drafts, rule.get("ends", frozenset()), rule.get("room"))
    tokens: list[int] = []
    relaxed, lost = 0, Fraction(0)
    for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
        if verdict not in (Verdict.FIRST, Verdict.RELAXED):
            return Verified([*tokens, argmax(row)], len(tokens), relaxed, verdicts, lost)
        is_counted = verdict == Verdict.RELAXED and len(tokens) <= gainful
        relaxed += is_counted
        lost += loss(row, draft) * is_counted
        tokens.append(draft)
    emitted = tokens if bonus is None else [*tokens, bonus]
    return Verified(emitted, len(tokens), relaxed, verdicts, lost)


def softmax(row: Sequence[float]) -> list[float]:
    """p of each token; all NaN if a logit is NaN or +inf, or all are -inf."""
    if any(math.isnan(logit) or logit == math.inf for logit in row) or max(row) == -math.inf:
        return [math.nan] * len(row)
    shares = [math.exp(logit - max(row)) for logit in row]
    return [share / sum(shares) for share in shares]


def tilts(
    rows: Sequence[Sequence[float]],
    drafts: Sequence[int],
    price: float | Fraction,
    is_strict: Sequence[bool],
    gainful: int,
    preserved: Sequence[frozenset[int]],
) -> list[float]:
    """Bias b at each position of a fixed draft, for a sampled request without a bound."""
    biases, ahead = [0.0] * (len(drafts) - gainful), 0.0
    positions = list(zip(rows, drafts, is_strict, preserved, strict=True))[:gainful]
    for row, draft, strict, tokens in reversed(positions):
        shares = softmax(row)
        p = shares[draft] if 0 <= draft < len(row) else 0.0
        # Nothing is accepted on a row with a NaN.
        p = 0.0 if math.isnan(p) else p
        bias = float(in_steps(price)) + ahead if p > 0 else 0.0
        if p > 0:
            rest = sum(share for token, share in enumerate(shares) if token not in tokens)
            ahead = p * bias if strict else rest * math.log(tilted(p / rest, bias))
        else:
            ahead = 0.0
        biases.append(0.0 if strict else bias)
    return biases[::-1]


def tilted(p: float, bias: float) -> float:
    """Sum of the distribution after exp(bias) has multiplied a token of probability p."""
    return 1 - p + p * math.exp(bias)


def served(
    row: Sequence[float], draft: int, bias: float, preserved: frozenset[int] = frozenset()
) -> list[float]:
    """m of each token; preserved tokens have the target's probability."""
    p = softmax(row)
    if not bias:
        return p
    free = [token for token in range(len(row)) if token not in preserved]
    shares = [p[token] * (math.exp(bias) if token == draft else 1) for token in free]
    scale = sum(p[token] for token in free) / sum(shares)
    m = list(p)
    for token, share in zip(free, shares, strict=True):
        m[token] = share * scale
    return m


def divergence(m: Sequence[float], p: Sequence[float]) -> float:
    """KL(m || p) in nats."""
    return sum(a * math.log(a / b) for a, b in zip(m, p, strict=True) if a > 0)


def drift(m: Sequence[float], p: Sequence[float]) -> float:
    """E_m[-log p] - H(p) in nats."""
    return sum((b - a) * math.log(b) for a, b in zip(m, p, strict=True) if b > 0)
