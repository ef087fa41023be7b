"""Relaxed acceptance: `naive.delta` in Triton."""

import triton
import triton.language as tl

from vllm_mars.kernels.rows.joined import log_sum_exp
from vllm_mars.kernels.rules.fused import outright
from vllm_mars.kernels.rules.naive import delta

_TOP = tl.constexpr(delta.TOP)


@triton.jit
def _accepts(rows, splits, value, offset, length, SPLITS: tl.constexpr):
    partials, row, num_splits = splits
    is_read = (offset < length) & (rows.draft >= 0)
    lse, _ = log_sum_exp(partials, row, is_read, rows.first, num_splits, SPLITS)
    difference = tl.exp(rows.first - lse) - tl.exp(rows.logit - lse)
    split = tl.arange(0, SPLITS)[None, :]
    index = row.to(tl.int64)[:, None] * num_splits + split
    parts = tl.load(
        partials.larger + index, mask=is_read[:, None] & (split < num_splits), other=0.0
    )
    # The integers first: the interpreter takes the type of a comparison from its operands.
    is_allowed = is_read & (value > 0) & (tl.sum(parts, axis=1) < _TOP)
    return is_allowed & (difference <= value.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def greedy(rows, splits, value, most, gainful, offset, length, SPLITS: tl.constexpr):
    """Verdicts of a greedy request."""
    accepts = _accepts(rows, splits, value, offset, length, SPLITS)
    return outright.greedy(rows, accepts, most, offset, length)


@triton.jit
def sampled(rows, odds, splits, value, most, gainful, offset, length, SPLITS: tl.constexpr):
    """What is decided where a request samples."""
    accepts = _accepts(rows, splits, value, offset, length, SPLITS)
    return outright.sampled(rows, odds, accepts, most, offset, length)
