"""What rules have in common that accept a token outright, by what they see of its row alone.

Greedily, what such a rule accepts is RELAXED. Of a request that samples it accepts likewise, the
first choice included, and strict is where x or the first choice is kept: m is the point x. Its loss
is -log p(x), its drift -log p(x) - H(p). Drafts are not drawn.
"""

import math
from collections.abc import Callable

from vllm_mars.kernels.law.naive import Position
from vllm_mars.kernels.ledger.naive import Allowance, nearest_units, units_of
from vllm_mars.kernels.rows.naive import Rows
from vllm_mars.kernels.verdicts import Verdict

# Whether a rule accepts the draft token of a row, by its value as a record holds it.
Accepts = Callable[[Rows, int, int], bool]


def greedy(rows: Rows, begin: int, end: int, allowed: Allowance, accepts: Accepts) -> list[Verdict]:
    """The verdicts at the positions of a greedy request's draft."""
    verdicts, lost = [], 0
    for offset, i in enumerate(range(begin, end)):
        verdict = Verdict.NONE
        if rows.draft[i] == rows.argmax[i]:
            verdict = Verdict.FIRST
        elif accepts(rows, i, allowed.value):
            verdict = _judged(rows, i, lost + rows.loss[i] <= allowed.at(offset))
        lost += rows.loss[i] * (verdict == Verdict.RELAXED)
        verdicts.append(verdict)
    return verdicts


def sampled(
    rows: Rows, begin: int, end: int, allowed: Allowance, accepts: Accepts
) -> list[Position]:
    """What is decided at the positions of a draft of a request that samples."""
    positions, lost = [], 0
    for offset, i in enumerate(range(begin, end)):
        log_p, position = rows.log_p[i], Position(Verdict.NONE)
        if log_p > -math.inf and accepts(rows, i, allowed.value):
            loss = units_of(-log_p)
            position = Position(_judged(rows, i, lost + loss <= allowed.at(offset)))
            if position.verdict == Verdict.RELAXED:
                # The draft token's share of m is 1: log m - log p is -log p.
                drift = nearest_units(-log_p - rows.entropy[i])
                gained = nearest_units(1 - math.exp(log_p))
                position = Position(Verdict.RELAXED, math.inf, log_p, loss, gained, drift)
        lost += position.loss
        positions.append(position)
    return positions


def _judged(rows: Rows, i: int, fits: bool) -> Verdict:
    return rows.forbids(i, looks_at_first=True) or (Verdict.RELAXED if fits else Verdict.LOSS)
