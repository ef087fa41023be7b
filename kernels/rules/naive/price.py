"""The prefix of the draft is accepted that is worth most: each token gained may cost so many nats.

Greedily every x with a finite logit is PAYABLE, of any rank. With V = 0 behind the draft, going
backwards

    FIRST      V_i = price + V_(i+1)
    PAYABLE    V_i = max(0, price + V_(i+1) - r_i), RELAXED where that is above 0
    others     V_i = 0

Where a request samples, m is that of `served_dist`. Of a draft that is not drawn it is found at a
price of b_i = price + V_(i+1), but at most the `max_bias` of what may still be lost:

    V_i = R log Z
    V_i = p(x) b_i at a strict position, as where x is kept; there m = p

Of drafts that are drawn see `clip_prices`. Greedy is the limit as the temperature goes to 0.

At the last token of an answer the position is strict and V_i = 0. Price 0 relaxes nothing.

This rule is the project's own: docs/rule.md.
"""

import math

from vllm_mars.kernels.budget import UNIT, LossBudget
from vllm_mars.kernels.interface import Verdict
from vllm_mars.kernels.row_stats.naive import Rows, num_extendable
from vllm_mars.kernels.served_dist.naive import (
    RowDecision,
    log_partition,
    max_bias,
    point_mass_dist,
)


def greedy(rows: Rows, begin: int, end: int, budget: LossBudget) -> list[Verdict]:
    """The verdicts at the positions of a greedy request's draft."""
    verdicts: list[Verdict] = []
    price, extendable = budget.value, num_extendable(rows, begin, end, budget)
    lost = 0
    for offset, i in enumerate(range(begin, end)):
        verdict = Verdict.NONE
        if rows.draft[i] == rows.argmax[i]:
            verdict = Verdict.FIRST
        elif rows.is_finite[i] and price > 0 and offset < extendable:
            verdict = Verdict.PAYABLE
            if reason := rows.forbids(i, checks_argmax=True):
                verdict = reason if rows.loss[i] < price else Verdict.NONE
            elif lost + rows.loss[i] > budget.at(offset):
                verdict = Verdict.LOSS
            else:
                lost += rows.loss[i]
        verdicts.append(verdict)
    ahead = 0
    for offset in reversed(range(end - begin)):
        verdict, value = verdicts[offset], 0
        if verdict == Verdict.FIRST and offset < extendable:
            value = price + ahead
        elif verdict == Verdict.PAYABLE:
            value = max(0, price + ahead - rows.loss[begin + offset])
            verdicts[offset] = Verdict.RELAXED if value > 0 else Verdict.NONE
        ahead = value
    return verdicts


def sampled(rows: Rows, begin: int, end: int, budget: LossBudget) -> list[RowDecision]:
    """What is decided at the positions of a draft, not drawn, of a request that samples."""
    # Behind these positions nothing can be gained.
    extendable = num_extendable(rows, begin, end, budget)
    reasons = [rows.forbids(i, checks_argmax=False) for i in range(begin, end)]
    value = 0.0
    biases = [0.0] * (end - begin)
    for offset in reversed(range(extendable)):
        log_p, rest = rows.log_p[begin + offset], rows.rest[begin + offset]
        bias = budget.value * UNIT + value
        if not log_p > -math.inf:
            value = 0.0
        elif reasons[offset]:
            value = math.exp(log_p) * bias
        else:
            biases[offset], value = bias, rest * log_partition(log_p, rest, bias)
    decisions: list[RowDecision] = []
    lost = 0
    for offset, (i, reason) in enumerate(zip(range(begin, end), reasons, strict=True)):
        log_p, left = rows.log_p[i], budget.at(offset) - lost
        decision = RowDecision(Verdict.NONE)
        if biases[offset] > 0:
            own = log_p, rows.rest[i], rows.rest_entropy[i]
            decision = point_mass_dist(*own, min(biases[offset], max_bias(left)), left)
        elif reason and log_p > -math.inf and budget.value and offset < extendable:
            decision = RowDecision(reason)
        lost += decision.loss
        decisions.append(decision)
    return decisions
