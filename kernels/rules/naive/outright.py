"""Rules that accept tokens outright, each by its row only; drafts must be fixed.

In sampled requests the argmax is also accepted, and m is the point x. A position is strict if x or
the argmax is in S. The loss is -log p(x), the drift -log p(x) - H(p).
"""

import math
from collections.abc import Callable

from vllm_mars.kernels.budget import LossBudget, ceil_units, round_units
from vllm_mars.kernels.interface import Verdict
from vllm_mars.kernels.row_stats.naive import Rows
from vllm_mars.kernels.served_dist.naive import RowDecision

# (rows, row, encoded value of the rule) -> whether the row's draft token is accepted.
Accepts = Callable[[Rows, int, int], bool]


def greedy(rows: Rows, begin: int, end: int, budget: LossBudget, accepts: Accepts) -> list[Verdict]:
    verdicts = []
    lost = 0
    for offset, i in enumerate(range(begin, end)):
        verdict = Verdict.NONE
        if rows.draft[i] == rows.argmax[i]:
            verdict = Verdict.FIRST
        elif accepts(rows, i, budget.value):
            verdict = _judged(rows, i, lost + rows.loss[i] <= budget.at(offset))
        lost += rows.loss[i] * (verdict == Verdict.RELAXED)
        verdicts.append(verdict)
    return verdicts


def sampled(
    rows: Rows, begin: int, end: int, budget: LossBudget, accepts: Accepts
) -> list[RowDecision]:
    decisions = []
    lost = 0
    for offset, i in enumerate(range(begin, end)):
        log_p = rows.log_p[i]
        decision = RowDecision(Verdict.NONE)
        if log_p > -math.inf and accepts(rows, i, budget.value):
            loss = ceil_units(-log_p)
            decision = RowDecision(_judged(rows, i, lost + loss <= budget.at(offset)))
            if decision.verdict == Verdict.RELAXED:
                # m(x) = 1
                decision = RowDecision(
                    verdict=Verdict.RELAXED,
                    bias=math.inf,
                    log_z=log_p,
                    loss=loss,
                    gained=round_units(1 - math.exp(log_p)),
                    drift=round_units(-log_p - rows.entropy[i]),
                )
        lost += decision.loss
        decisions.append(decision)
    return decisions


def _judged(rows: Rows, i: int, fits: bool) -> Verdict:
    return rows.forbids(i, checks_argmax=True) or (Verdict.RELAXED if fits else Verdict.LOSS)
