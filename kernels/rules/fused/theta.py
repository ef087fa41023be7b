"""Margin rule: `naive.theta` in Triton."""

import triton
import triton.language as tl

from vllm_mars.kernels.rules.fused import outright


@triton.jit
def _accepts(rows, value):
    # The record holds the float32 steps from theta to 1.
    theta = (0x3F800000 - value).to(tl.int32).to(tl.float32, bitcast=True)
    theta += tl.zeros_like(rows.first)
    # z2 > theta * z1 and z1 > 0
    is_close = (rows.second > theta * rows.first) & ((theta == 1.0) | (rows.first > 0.0))
    return is_close & (rows.draft >= 0) & (rows.logit >= rows.second)


@triton.jit
def greedy(rows, value, remaining, extendable, offset, length):
    return outright.greedy(rows, _accepts(rows, value), remaining, offset, length)


@triton.jit
def sampled(rows, logprobs, value, remaining, extendable, offset, length):
    return outright.sampled(rows, logprobs, _accepts(rows, value), remaining, offset, length)
