"""Price rule: accepts the draft prefix of highest value; each token gained is worth `price` nats.

Price 0 is strict. Greedy is the limit of sampled as the temperature goes to 0. See docs/rule.md.
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
    verdicts: list[Verdict] = []
    price = budget.value
    extendable = num_extendable(rows, begin, end, budget)
    lost = 0
    # A token of any rank is PAYABLE if its logit is finite.
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
    # Backwards from V = 0 after the draft, and V_i = 0 at the last token of the answer:
    #   FIRST    V_i = price + V_(i+1)
    #   PAYABLE  V_i = max(0, price + V_(i+1) - r_i), RELAXED if above 0
    #   others   V_i = 0
    ahead = 0
    for offset in reversed(range(end - begin)):
        verdict = verdicts[offset]
        value = 0
        if verdict == Verdict.FIRST and offset < extendable:
            value = price + ahead
        elif verdict == Verdict.PAYABLE:
            value = max(0, price + ahead - rows.loss[begin + offset])
            verdicts[offset] = Verdict.RELAXED if value > 0 else Verdict.NONE
        ahead = value
    return verdicts


def sampled(rows: Rows, begin: int, end: int, budget: LossBudget) -> list[RowDecision]:
    """Decides at the positions of a fixed draft; `clip_prices` is for probabilistic drafts."""
    extendable = num_extendable(rows, begin, end, budget)
    reasons = [rows.forbids(i, checks_argmax=False) for i in range(begin, end)]
    # Backwards, with m of `served_dist` at b_i = price + V_(i+1):
    #   V_i = R log Z
    #   V_i = p(x) b_i at a strict position or if x is in S; there m = p
    value = 0.0
    biases = [0.0] * (end - begin)
    for offset in reversed(range(extendable)):
        log_p = rows.log_p[begin + offset]
        rest = rows.rest[begin + offset]
        bias = budget.value * UNIT + value
        if not log_p > -math.inf:
            value = 0.0
        elif reasons[offset]:
            value = math.exp(log_p) * bias
        else:
            biases[offset] = bias
            value = rest * log_partition(log_p, rest, bias)
    # Forwards: each bias is capped by the budget that earlier positions have left.
    decisions: list[RowDecision] = []
    lost = 0
    for offset, (i, reason) in enumerate(zip(range(begin, end), reasons, strict=True)):
        log_p = rows.log_p[i]
        left = budget.at(offset) - lost
        decision = RowDecision(Verdict.NONE)
        if biases[offset] > 0:
            decision = point_mass_dist(
                log_p,
                rows.rest[i],
                rows.rest_entropy[i],
                bias=min(biases[offset], max_bias(left)),
                left=left,
            )
        elif reason and log_p > -math.inf and budget.value and offset < extendable:
            decision = RowDecision(reason)
        lost += decision.loss
        decisions.append(decision)
    return decisions
