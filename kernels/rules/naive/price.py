"""The prefix of the draft is accepted that is worth most: each token gained may cost so many nats.

Greedily every x with a finite logit is PAYABLE, of any rank. With V = 0 behind the draft, going
backwards

    FIRST      V_i = price + V_(i+1)
    PAYABLE    V_i = max(0, price + V_(i+1) - r_i), RELAXED where that is above 0
    others     V_i = 0

Where a request samples, m is that of `law`. Of a draft that is not drawn it is found at a price of
b_i = price + V_(i+1), but at most the `cap` of what may still be lost:

    V_i = R log Z
    V_i = p(x) b_i at a strict position, as where x is kept; there m = p

Of drafts that are drawn see `drawn_prices`. Greedy is the limit as the temperature goes to 0.

At the last token of an answer the position is strict and V_i = 0. Price 0 relaxes nothing.

This rule is the project's own: docs/rule.md.
"""

import math

from vllm_mars.kernels.law.naive import Position, cap, log_partition, tilted
from vllm_mars.kernels.ledger.naive import UNIT, Allowance
from vllm_mars.kernels.rows.naive import Rows, num_gainful
from vllm_mars.kernels.verdicts import Verdict


def greedy(rows: Rows, begin: int, end: int, allowed: Allowance) -> list[Verdict]:
    """The verdicts at the positions of a greedy request's draft."""
    verdicts: list[Verdict] = []
    price, gainful = allowed.value, num_gainful(rows, begin, end, allowed)
    lost = 0
    for offset, i in enumerate(range(begin, end)):
        verdict = Verdict.NONE
        if rows.draft[i] == rows.argmax[i]:
            verdict = Verdict.FIRST
        elif rows.is_finite[i] and price > 0 and offset < gainful:
            verdict = Verdict.PAYABLE
            if reason := rows.forbids(i, looks_at_first=True):
                verdict = reason if rows.loss[i] < price else Verdict.NONE
            elif lost + rows.loss[i] > allowed.at(offset):
                verdict = Verdict.LOSS
            else:
                lost += rows.loss[i]
        verdicts.append(verdict)
    ahead = 0
    for offset in reversed(range(end - begin)):
        verdict, value = verdicts[offset], 0
        if verdict == Verdict.FIRST and offset < gainful:
            value = price + ahead
        elif verdict == Verdict.PAYABLE:
            value = max(0, price + ahead - rows.loss[begin + offset])
            verdicts[offset] = Verdict.RELAXED if value > 0 else Verdict.NONE
        ahead = value
    return verdicts


def sampled(rows: Rows, begin: int, end: int, allowed: Allowance) -> list[Position]:
    """What is decided at the positions of a draft, not drawn, of a request that samples."""
    # Behind these positions nothing can be gained.
    gainful = num_gainful(rows, begin, end, allowed)
    reasons = [rows.forbids(i, looks_at_first=False) for i in range(begin, end)]
    value = 0.0
    biases = [0.0] * (end - begin)
    for offset in reversed(range(gainful)):
        log_p, rest = rows.log_p[begin + offset], rows.rest[begin + offset]
        bias = allowed.value * UNIT + value
        if not log_p > -math.inf:
            value = 0.0
        elif reasons[offset]:
            value = math.exp(log_p) * bias
        else:
            biases[offset], value = bias, rest * log_partition(log_p, rest, bias)
    positions: list[Position] = []
    lost = 0
    for offset, (i, reason) in enumerate(zip(range(begin, end), reasons, strict=True)):
        log_p, left = rows.log_p[i], allowed.at(offset) - lost
        position = Position(Verdict.NONE)
        if biases[offset] > 0:
            own = log_p, rows.rest[i], rows.rest_entropy[i]
            position = tilted(*own, min(biases[offset], cap(left)), left)
        elif reason and log_p > -math.inf and allowed.value and offset < gainful:
            position = Position(reason)
        lost += position.loss
        positions.append(position)
    return positions
