"""Counters in Triton; the two kernels touch a few numbers per request and are launch-bound."""

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.constants import C
from vllm_mars.kernels.counters.table import CounterLayout
from vllm_mars.kernels.interface import Records
from vllm_mars.kernels.launch import UNALIGNED, UNSPECIALIZED

# Columns of logprobs per block.
_BLOCK = 128


@triton.jit
def record_step(
    step_counters,
    lost_ptr,
    req_idx,
    offset,
    draft,
    verdict,
    loss,
    gained,
    drift,
    ratio,
    accepted,
    is_counted,
    is_greedy,
    is_relaxable,
    num_speculative_tokens,
    BLOCK_VERIFY: tl.constexpr,
):
    """Updates counters, report row and the record's LOST; returns relaxed tokens and loss."""
    is_visited = is_counted & (offset <= accepted)
    is_accepted = is_counted & (offset < accepted)
    is_relaxed = is_accepted & (verdict == C.VERDICT.RELAXED)
    spends = is_relaxed | (is_visited & (is_greedy == 0))
    step_lost = tl.sum(tl.where(spends, loss, 0), axis=0)
    gains = spends
    if BLOCK_VERIFY:
        # The gain of a block is expected at all positions, also at those that are not reached.
        gains = gains | (is_counted & (is_greedy == 0))
    step_gained = tl.sum(tl.where(gains, gained, 0), axis=0)
    lost = tl.load(lost_ptr)
    # All warps must load before one of them stores.
    tl.debug_barrier()
    tl.store(lost_ptr, lost + step_lost)

    one = tl.full(offset.shape, 1, tl.int64)
    is_verified = is_visited & (draft >= 0)
    # Counters with an entry per position come first: see `COUNTER_OFFSETS`.
    position_ptr = step_counters.counts + offset
    k = num_speculative_tokens
    tl.atomic_add(position_ptr + C.COUNTER.verified * k, one, mask=is_verified, sem="relaxed")
    tl.atomic_add(
        position_ptr + C.COUNTER.accepted * k, one, mask=is_verified & is_accepted, sem="relaxed"
    )
    tl.atomic_add(
        position_ptr + C.COUNTER.relaxed * k, one, mask=is_verified & is_relaxed, sem="relaxed"
    )
    counts_ptr = step_counters.counts + C.BY_POSITION * k
    tl.atomic_add(counts_ptr + C.COUNTER.lost, step_lost, sem="relaxed")
    tl.atomic_add(counts_ptr + C.COUNTER.gained, step_gained, sem="relaxed")
    drift = tl.where(spends, drift, 0)
    drift_up = tl.sum(tl.maximum(drift, 0), axis=0)
    drift_down = tl.sum(tl.maximum(-drift, 0), axis=0)
    tl.atomic_add(counts_ptr + C.COUNTER.drift_up, drift_up, sem="relaxed")
    tl.atomic_add(counts_ptr + C.COUNTER.drift_down, drift_down, sem="relaxed")
    relaxable = tl.sum(tl.where(is_relaxable, is_verified.to(tl.int64), 0), axis=0)
    tl.atomic_add(counts_ptr + C.COUNTER.relaxable, relaxable, sem="relaxed")
    is_refused = is_verified & (verdict >= C.VERDICT.PROTECTED)
    refusal = C.COUNTER.refused + tl.maximum(verdict - C.VERDICT.PROTECTED, 0)
    tl.atomic_add(counts_ptr + refusal, one, mask=is_refused, sem="relaxed")

    relaxed_loss = tl.where(is_relaxed, loss.to(tl.float32) * C.UNIT, float("nan"))
    log_ratio = tl.where(offset <= accepted, ratio, float("nan"))
    width = num_speculative_tokens + 1
    table_ptr = step_counters.table + req_idx.to(tl.int64) * 2 * width + offset
    tl.store(table_ptr, tl.where(is_greedy, relaxed_loss, log_ratio), mask=offset < width)
    drift_nats = tl.where(is_greedy, 0.0, drift.to(tl.float32) * C.UNIT)
    tl.store(table_ptr + width, drift_nats, mask=offset < width)
    return tl.sum(is_relaxed.to(tl.int32), axis=0), step_lost


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def ended_kernel(
    # [layout.size] int64, added to: see `CounterLayout`
    counts_ptr,
    # [S, RECORD_SIZE] int64
    records_ptr,
    # [num_ended] int32
    slots_ptr,
    # [NUM_BOUNDS] int64, inclusive upper bounds of all buckets except the last, in units
    bounds_ptr,
    ENDED: tl.constexpr,
    ENDED_LOST: tl.constexpr,
    NUM_BOUNDS: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    lost = tl.load(records_ptr + slot * C.RECORD_SIZE + C.COLUMN.LOST)
    index = tl.arange(0, BOUNDS)
    is_bound = index < NUM_BOUNDS
    bounds = tl.load(bounds_ptr + index, mask=is_bound, other=0)
    bucket = tl.sum((is_bound & (lost > bounds)).to(tl.int32), axis=0)
    tl.atomic_add(counts_ptr + ENDED + bucket, 1)
    tl.atomic_add(counts_ptr + ENDED_LOST + bucket, lost)


def count_ended(
    counts: torch.Tensor,
    layout: CounterLayout,
    bounds: torch.Tensor,
    records: Records,
    slots: torch.Tensor,
) -> None:
    """Counts requests that end, in buckets by loss; shapes as in `ended_kernel`."""
    ended_kernel[(len(slots),)](
        counts,
        records.table,
        slots,
        bounds,
        ENDED=layout.ended.start,
        ENDED_LOST=layout.ended_lost.start,
        NUM_BOUNDS=len(bounds),
        BOUNDS=triton.next_power_of_2(len(bounds)),
        num_warps=1,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def ratios_kernel(
    # [num_rows, columns] float32, added to
    logprobs_ptr,
    logprobs_stride,
    # [num_rows, columns], the sampled token first
    ids_ptr,
    ids_stride,
    columns,
    # [batch, 2, WIDTH] float32: see `StepCounters`
    table_ptr,
    # [S] float32; 0 is greedy
    temperature_ptr,
    # [batch] int32 or int64
    slots_ptr,
    # [batch + 1] int32, exclusive prefix sum of the requests' rows
    cu_num_logits_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req_idx = tl.program_id(0)
    local_pos = tl.program_id(1)
    row = tl.load(cu_num_logits_ptr + req_idx) + local_pos
    if row >= tl.load(cu_num_logits_ptr + req_idx + 1):
        return
    ratio = tl.load(table_ptr + req_idx * 2 * WIDTH + local_pos)
    slot = tl.load(slots_ptr + req_idx).to(tl.int64)
    # Rows of greedy requests hold losses, and entries after the last token are NaN.
    if (ratio != ratio) | (tl.load(temperature_ptr + slot) == 0.0):
        return
    logprobs_ptr += row.to(tl.int64) * logprobs_stride
    ids_ptr += row.to(tl.int64) * ids_stride
    sampled = tl.load(ids_ptr)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_column = column < columns
        # The sampled token may also be among the top tokens.
        is_sampled = tl.load(ids_ptr + column, mask=is_column, other=-1) == sampled
        # log m = log p + (log m - log p)
        value = tl.load(logprobs_ptr + column, mask=is_column, other=0.0)
        tl.store(logprobs_ptr + column, value + ratio, mask=is_column & is_sampled)


def add_log_ratios(
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
    temperature: torch.Tensor,
    slots: torch.Tensor,
    cu_num_logits: torch.Tensor,
) -> None:
    """Replaces log p of sampled tokens by log m; shapes as in `ratios_kernel`."""
    batch, _, width = table.shape
    ratios_kernel[(batch, width)](
        logprobs,
        logprobs.stride(0),
        token_ids,
        token_ids.stride(0),
        token_ids.shape[1],
        table,
        temperature,
        slots,
        cu_num_logits,
        WIDTH=width,
        BLOCK=_BLOCK,
        num_warps=1,
        enable_fp_fusion=False,
    )
