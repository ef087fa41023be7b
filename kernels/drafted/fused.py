"""Adds drafted tokens to the output-token counts that vLLM's penalties read."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["counts_stride", "tokens_stride", "vocab"])
def count_kernel(
    # [S, vocab] int32, added to
    counts_ptr,
    counts_stride,
    # [num_rows] int64, contiguous; -1 for a padding row
    slots_ptr,
    # [>= num_rows, K] int64
    tokens_ptr,
    tokens_stride,
    # [], number of tokens drafted so far
    step_ptr,
    vocab,
    BY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    num_drafted = tl.where(slot >= 0, tl.load(step_ptr), 0)
    for local_pos in range(0, num_drafted):
        token = tl.load(tokens_ptr + row * tokens_stride + local_pos)
        count_ptr = counts_ptr + slot * counts_stride + token
        tl.atomic_add(count_ptr, BY, mask=(token >= 0) & (token < vocab), sem="relaxed")


def count_drafted(
    counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, step: torch.Tensor, by: int
) -> None:
    """Adds the tokens drafted so far `by` times, 1 or -1; shapes as in `count_kernel`."""
    count_kernel[(len(slots),)](
        counts,
        counts.stride(0),
        slots,
        tokens,
        tokens.stride(0),
        step,
        counts.shape[1],
        BY=by,
        num_warps=1,
    )
