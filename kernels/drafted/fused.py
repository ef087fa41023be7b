"""The tokens of the draft so far among the counts of output tokens, which vLLM's penalties read.

    count_kernel   grid (rows,)   adds `BY` to the count of each of them

A few numbers for each request; all of its time is that of the launch.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["counts_stride", "tokens_stride", "vocab"])
def count_kernel(
    # [S, vocab]
    counts_ptr,
    counts_stride,
    # [rows]
    slots_ptr,
    # [rows, K]
    tokens_ptr,
    tokens_stride,
    # []
    step_ptr,
    vocab,
    BY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    # A slot of -1 fills the batch up.
    drafted = tl.where(slot >= 0, tl.load(step_ptr), 0)
    for place in range(0, drafted):
        token = tl.load(tokens_ptr + row * tokens_stride + place)
        count_ptr = counts_ptr + slot * counts_stride + token
        tl.atomic_add(count_ptr, BY, mask=(token >= 0) & (token < vocab), sem="relaxed")


def count_drafted(
    counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, step: torch.Tensor, by: int
) -> None:
    """Adds the tokens of the draft so far to what is counted, or takes them off.

    Args:
        counts: int32 `[S, vocab]`, by slot, written.
        slots: int64 `[rows]`, of the requests, contiguous; -1 for none.
        tokens: int64 `[at least rows, K]`, of each row's draft.
        step: an integer on the device, how many of these are drafted.
        by: 1 or -1, what is added for each.
    """
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
