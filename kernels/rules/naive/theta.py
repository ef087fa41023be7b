"""Margin rule of arXiv 2601.15498: x is accepted if it is in the top 2, z2 > theta * z1 and z1 > 0.

At theta 1 nothing is relaxed; near 0 every runner-up is accepted if z1 > 0.
"""

from functools import partial

import numpy as np

from vllm_mars.kernels.interface import decode_value
from vllm_mars.kernels.row_stats.naive import Rows
from vllm_mars.kernels.rules import THETA
from vllm_mars.kernels.rules.naive import outright


def accepts(rows: Rows, i: int, value: int) -> bool:
    """Whether the rule accepts the draft token of a row, without computing z2."""
    draft = rows.draft[i]
    argmax = rows.argmax[i]
    logits = rows.logits[i]
    if draft < 0:
        return False
    theta = decode_value(THETA, value)
    threshold = theta * logits[argmax]
    if not (logits[draft] > threshold and (theta == 1 or logits[argmax] > 0)):
        return False
    if draft == argmax:
        # z1 and z2 are above.
        return bool(np.count_nonzero(logits > threshold) >= 2)
    # z[x] is z2, or a tie.
    return bool(np.count_nonzero(logits > logits[draft]) <= 1)


greedy = partial(outright.greedy, accepts=accepts)
sampled = partial(outright.sampled, accepts=accepts)
