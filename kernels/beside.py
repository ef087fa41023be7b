"""What a step of Model Runner V2 does beside verifying, each in one launch in the place of many.

    anew_kernel    grid (blocks,)  with what the next drafts are drawn: a request's temperature
                                   times its share, and a seed that no step has twice
    ended_kernel   grid (ended,)   what requests lost that end, by bucket
    ratios_kernel  grid (B, K + 1) log p of a token that was sampled becomes log m

Each reads and writes a few numbers for each request; all of their time is that of the launch.
"""

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.terms import RECORD_SIZE, Column, CounterLayout, Records

# Requests of a program, and columns of logprobs that are looked at at a time.
_BLOCK = 128
# Views that start anywhere.
_UNALIGNED = ["slots_ptr", "cu_num_logits_ptr"]


@triton.jit(do_not_specialize=["batch", "share"], do_not_specialize_on_alignment=_UNALIGNED)
def anew_kernel(
    # [S], or None
    drawn_at_ptr,
    new_seeds_ptr,
    # Of the temperature, of requests that are not strict
    share,
    # [S, SIZE]
    records_ptr,
    # [S]
    temperature_ptr,
    seeds_ptr,
    total_len_ptr,
    # [batch], -1 for none
    slots_ptr,
    batch,
    PRICE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + place, mask=place < batch, other=-1).to(tl.int64)
    is_there = slot >= 0
    if drawn_at_ptr is not None:
        price = tl.load(records_ptr + slot * SIZE + PRICE, mask=is_there, other=0)
        temperature = tl.load(temperature_ptr + slot, mask=is_there, other=0.0)
        drawn_at = tl.where(price > 0, temperature * share, temperature)
        tl.store(drawn_at_ptr + slot, drawn_at, mask=is_there)
    if new_seeds_ptr is not None:
        seed = tl.load(seeds_ptr + slot, mask=is_there, other=0)
        # A request's tokens grow with each step.
        total = tl.load(total_len_ptr + slot, mask=is_there, other=0).to(tl.int64)
        tl.store(new_seeds_ptr + slot, seed ^ (total << 32), mask=is_there)


def draw_anew(
    drawn_at: torch.Tensor | None,
    new_seeds: torch.Tensor | None,
    share: float,
    records: Records,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    total_len: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Writes with what the drafts of some requests are drawn.

    Args:
        drawn_at: float32 `[S]`, the share of the temperature; written at the slots, unless None.
        new_seeds: int64 `[S]`, likewise the seed of the step.
        share: of the temperature, of requests that are not strict.
        records: of all slots.
        temperature: float32 `[S]`.
        seeds: int64 `[S]`.
        total_len: int32 `[S]`, tokens of prompt and output.
        slots: int32 or int64 `[batch]`; -1 is skipped.
    """
    batch = len(slots)
    anew_kernel[(-(-batch // _BLOCK),)](
        drawn_at,
        new_seeds,
        share,
        records.table,
        temperature,
        seeds,
        total_len,
        slots,
        batch,
        PRICE=int(Column.PRICE),
        SIZE=RECORD_SIZE,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def ended_kernel(
    # [COUNTERS]: see `CounterLayout`
    counts_ptr,
    # [S, SIZE]
    records_ptr,
    # [num_ended]
    slots_ptr,
    # [NUM_BOUNDS]
    bounds_ptr,
    ENDED: tl.constexpr,
    ENDED_LOST: tl.constexpr,
    LOST: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_BOUNDS: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    lost = tl.load(records_ptr + slot * SIZE + LOST)
    place = tl.arange(0, BOUNDS)
    is_bound = place < NUM_BOUNDS
    bounds = tl.load(bounds_ptr + place, mask=is_bound, other=0)
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
    """Counts requests that end, by what they lost.

    Args:
        counts: int64 `[layout.size]`, added into.
        layout: which entry is what.
        bounds: int64, the most that a request of each bucket but the last lost, in units of
            2**-LOSS_BITS nats.
        records: of all slots.
        slots: int32 `[num_ended]`, where the requests are.
    """
    ended_kernel[(len(slots),)](
        counts,
        records.table,
        slots,
        bounds,
        ENDED=layout.ended.start,
        ENDED_LOST=layout.ended_lost.start,
        LOST=int(Column.LOST),
        SIZE=RECORD_SIZE,
        NUM_BOUNDS=len(bounds),
        BOUNDS=triton.next_power_of_2(len(bounds)),
        num_warps=1,
    )


@triton.jit(
    do_not_specialize=["columns", "logprobs_stride", "ids_stride"],
    do_not_specialize_on_alignment=_UNALIGNED,
)
def ratios_kernel(
    # [num_rows, columns] each
    logprobs_ptr,
    logprobs_stride,
    ids_ptr,
    ids_stride,
    columns,
    # [batch, 2, WIDTH]: see `Account`
    table_ptr,
    # [S]
    temperature_ptr,
    # [batch]
    slots_ptr,
    # [batch + 1], exclusive prefix sum
    cu_num_logits_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    place = tl.program_id(1)
    row = tl.load(cu_num_logits_ptr + request) + place
    if row >= tl.load(cu_num_logits_ptr + request + 1):
        return
    ratio = tl.load(table_ptr + request * 2 * WIDTH + place)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    # Of a greedy request the table holds losses; behind the last token stands NaN.
    if (ratio != ratio) | (tl.load(temperature_ptr + slot) == 0.0):
        return
    logprobs_ptr += row.to(tl.int64) * logprobs_stride
    ids_ptr += row.to(tl.int64) * ids_stride
    sampled = tl.load(ids_ptr)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_there = column < columns
        is_sampled = tl.load(ids_ptr + column, mask=is_there, other=-1) == sampled
        # Any column may hold the sampled token again.
        value = tl.load(logprobs_ptr + column, mask=is_there, other=0.0)
        tl.store(logprobs_ptr + column, value + ratio, mask=is_there & is_sampled)


def add_log_ratios(
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
    temperature: torch.Tensor,
    slots: torch.Tensor,
    cu_num_logits: torch.Tensor,
) -> None:
    """Makes the log p of sampled tokens log m, as `verification.of_sampled` says it.

    Args:
        logprobs: float32 `[num_rows, columns]`, added into.
        token_ids: `[num_rows, columns]`, first the sampled token.
        table: float32 `[batch, 2, K + 1]`: see `Account`.
        temperature: float32 `[S]`; 0 is greedy.
        slots: int32 or int64 `[batch]`.
        cu_num_logits: int32 `[batch + 1]`, exclusive prefix sum of the requests' rows.
    """
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
    )
