"""The paper's rule: a runner-up is accepted where the margin to the first choice is small.

    accepts    x is one of the two largest, z2 > theta * z1, and z1 > 0

At theta 1 nothing is; near 0 every runner-up with a positive first choice. z2 is never computed:
with "larger" the number of logits above a pivot, that is so if

    x is not the first choice:  z[x] > theta * z1  and  larger(z[x]) <= 1    (z[x] is z2, or ties)
    x is the first choice:      larger(theta * z1) >= 2                      (z1 and z2 are above)

Source: arXiv 2601.15498.
"""

from functools import partial

import numpy as np

from vllm_mars.kernels.interface import decode_value
from vllm_mars.kernels.row_stats.naive import Rows
from vllm_mars.kernels.rules import THETA
from vllm_mars.kernels.rules.naive import outright


def accepts(rows: Rows, i: int, value: int) -> bool:
    """Whether the margin accepts the draft token of a row."""
    draft, argmax, row = rows.draft[i], rows.argmax[i], rows.logits[i]
    if draft < 0:
        return False
    theta, first, logit = decode_value(THETA, value), row[argmax], row[draft]
    least = theta * first
    if not (logit > least and (theta == 1 or first > 0)):
        return False
    if draft == argmax:
        return bool(np.count_nonzero(row > least) >= 2)
    return bool(np.count_nonzero(row > logit) <= 1)


greedy = partial(outright.greedy, accepts=accepts)
sampled = partial(outright.sampled, accepts=accepts)
