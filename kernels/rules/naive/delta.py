"""Relaxed acceptance: a token is accepted that is among the target's first and nearly as probable.

    accepts    fewer than TOP logits are larger than z[x], and p(first choice) - p(x) <= delta

At delta 0 nothing is; at 1 each of the TOP largest. Source: TensorRT-LLM, `relaxed_topk` and
`relaxed_delta` of its MTP decoding, there for thinking sections.
"""

from functools import partial

import numpy as np

from vllm_mars.kernels.record import float_of
from vllm_mars.kernels.rows.naive import Rows
from vllm_mars.kernels.rules import DELTA
from vllm_mars.kernels.rules.naive import outright

TOP = 10


def accepts(rows: Rows, i: int, value: int) -> bool:
    """Whether the draft token of a row is accepted."""
    draft, row = rows.draft[i], rows.logits[i]
    if draft < 0 or not value or np.count_nonzero(row > row[draft]) >= TOP:
        return False
    with np.errstate(invalid="ignore"):
        weights = np.exp(row - row[rows.argmax[i]])
    # Of infinities and a NaN no number comes out, which compares with nothing.
    return bool((1 - weights[draft]) / weights.sum() <= float_of(DELTA, value))


greedy = partial(outright.greedy, accepts=accepts)
sampled = partial(outright.sampled, accepts=accepts)
