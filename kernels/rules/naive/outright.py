"""What rules have in common that accept a token outright, by what they see of its row alone.

Greedily, what such a rule accepts is RELAXED. Of a request that samples it accepts likewise, the
first choice included, and strict is where x or the first choice is kept: m is the point x. Its loss
is -log p(x), its drift -log p(x) - H(p). Drafts are not drawn.
"""

import math
from collections.abc import Callable

from vllm_mars.kernels.budget import LossBudget, ceil_units, round_units
from vllm_mars.kernels.interface import Verdict
from vllm_mars.kernels.row_stats.naive import Rows
from vllm_mars.kernels.served_dist.naive import RowDecision

# Whether a rule accepts the draft token of a row, by its value as a record holds it.
Accepts = Callable[[Rows, int, int], bool]


def greedy(rows: Rows, begin: int, end: int, budget: LossBudget, accepts: Accepts) -> list[Verdict]:
    """The verdicts at the positions of a greedy request's draft."""
    verdicts, lost = [], 0
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
    """What is decided at the positions of a draft of a request that samples."""
    decisions, lost = [], 0
    for offset, i in enumerate(range(begin, end)):
        log_p, decision = rows.log_p[i], RowDecision(Verdict.NONE)
        if log_p > -math.inf and accepts(rows, i, budget.value):
            loss = ceil_units(-log_p)
            decision = RowDecision(_judged(rows, i, lost + loss <= budget.at(offset)))
            if decision.verdict == Verdict.RELAXED:
                # The draft token's share of m is 1: log m - log p is -log p.
                drift = round_units(-log_p - rows.entropy[i])
                gained = round_units(1 - math.exp(log_p))
                decision = RowDecision(Verdict.RELAXED, math.inf, log_p, loss, gained, drift)
        lost += decision.loss
        decisions.append(decision)
    return decisions


def _judged(rows: Rows, i: int, fits: bool) -> Verdict:
    return rows.forbids(i, checks_argmax=True) or (Verdict.RELAXED if fits else Verdict.LOSS)
