"""Counts of verified positions in one launch: see `vllm_mars.runner.counters.CounterLayout`."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from vllm_mars.kernels.reference import Verdict

if TYPE_CHECKING:
    from vllm_mars.runner.counters import Counters

_RELAXED = tl.constexpr(int(Verdict.RELAXED))
_PROTECTED = tl.constexpr(int(Verdict.PROTECTED))
_STRUCTURED = tl.constexpr(int(Verdict.STRUCTURED))
# Positions of a request go in blocks of this many.
_POSITIONS = 8
_UNALIGNED = [
    "top2_values_ptr",
    "verdicts_ptr",
    "num_accepted_ptr",
    "draft_token_ids_ptr",
    "cu_num_draft_tokens_ptr",
    "theta",
    "gap",
]


@triton.jit(
    do_not_specialize=["theta", "gap", "longest"], do_not_specialize_on_alignment=_UNALIGNED
)
def count_kernel(
    # [layout.size] int64
    counts_ptr,
    # [num_draft, 2]
    top2_values_ptr,
    # [num_draft]
    verdicts_ptr,
    # [batch]
    num_accepted_ptr,
    # [num_draft]
    draft_token_ids_ptr,
    # [batch], inclusive prefix sum
    cu_num_draft_tokens_ptr,
    # [num_edges]
    edges_ptr,
    # float, or [batch]
    theta,
    # float, or [batch]
    gap,
    longest,
    ratio_start,
    ratio_sum,
    refused_start,
    num_edges,
    units,
    EDGES: tl.constexpr,
    POSITIONS: tl.constexpr,
    THETA_PER_REQUEST: tl.constexpr,
    GAP_PER_REQUEST: tl.constexpr,
    DRY_RUN: tl.constexpr,
):
    request = tl.program_id(0)
    end = tl.load(cu_num_draft_tokens_ptr + request)
    start = tl.load(cu_num_draft_tokens_ptr + request - 1, mask=request > 0, other=0)
    accepted = tl.load(num_accepted_ptr + request)
    if THETA_PER_REQUEST:
        theta = tl.load(theta + request)
    if GAP_PER_REQUEST:
        gap = tl.load(gap + request)
    edge = tl.arange(0, EDGES)
    edges = tl.load(edges_ptr + edge, mask=edge < num_edges, other=float("inf"))
    one = tl.full([POSITIONS], 1, tl.int64)
    # Nothing behind the first rejected position is looked at.
    for block in range(0, tl.minimum(end - start, accepted + 1), POSITIONS):
        offset = block + tl.arange(0, POSITIONS)
        position = start + offset
        is_row = (position < end) & (offset <= accepted)
        draft = tl.load(draft_token_ids_ptr + position, mask=is_row, other=-1)
        is_verified = is_row & (draft >= 0)
        is_accepted = is_row & (offset < accepted)
        first = tl.load(top2_values_ptr + 2 * position, mask=is_verified, other=0.0)
        second = tl.load(top2_values_ptr + 2 * position + 1, mask=is_verified, other=0.0)
        verdict = tl.load(verdicts_ptr + position, mask=is_row, other=0)

        tl.atomic_add(counts_ptr + offset, one, mask=is_verified)
        tl.atomic_add(counts_ptr + longest + offset, one, mask=is_accepted)
        # Launched without fusion, so that theta * z1 is rounded before gap is taken off.
        is_low = is_verified & (second > theta * first - gap)
        tl.atomic_add(counts_ptr + 3 * longest + offset, one, mask=is_low)
        if not DRY_RUN:
            is_relaxed = is_accepted & (verdict == _RELAXED)
            tl.atomic_add(counts_ptr + 2 * longest + offset, one, mask=is_relaxed)
            is_refused = is_verified & (verdict >= _PROTECTED) & (verdict <= _STRUCTURED)
            refusal = verdict.to(tl.int32) - _PROTECTED
            tl.atomic_add(counts_ptr + refused_start + refusal, one, mask=is_refused)

        ratio = tl.div_rn(second, first)
        has_ratio = is_verified & (first > 0.0) & (ratio == ratio)
        ratio = tl.where(has_ratio, ratio, 0.0)
        bucket = tl.sum((ratio[:, None] > edges[None, :]).to(tl.int32), axis=1)
        tl.atomic_add(counts_ptr + ratio_start + bucket, one, mask=has_ratio)
        clamped = tl.minimum(tl.maximum(ratio, 0.0), 1.0)
        total = tl.sum(tl.floor(clamped * units + 0.5).to(tl.int64), axis=0)
        tl.atomic_add(counts_ptr + ratio_sum, total)


def count_positions(
    counters: "Counters",
    top2_values: torch.Tensor,
    verdicts: torch.Tensor,
    num_accepted: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    theta: float | torch.Tensor,
    gap: float | torch.Tensor,
    dry_run: bool,
) -> None:
    """The Triton form of `vllm_mars.runner.counters.count_positions`, which says what it takes."""
    from vllm_mars.runner.counters import RATIO_UNIT

    layout = counters.layout
    edges = counters.ratio_edges
    count_kernel[(num_accepted.shape[0],)](
        counters.device_counts,
        top2_values,
        verdicts,
        num_accepted,
        draft_token_ids,
        cu_num_draft_tokens,
        edges,
        theta,
        gap,
        layout.num_speculative_tokens,
        layout.ratio.start,
        layout.ratio_sum.start,
        layout.refused.start,
        edges.shape[0],
        1 / RATIO_UNIT,
        EDGES=triton.next_power_of_2(edges.shape[0]),
        POSITIONS=_POSITIONS,
        THETA_PER_REQUEST=isinstance(theta, torch.Tensor),
        GAP_PER_REQUEST=isinstance(gap, torch.Tensor),
        DRY_RUN=dry_run,
        enable_fp_fusion=False,
        num_warps=1,
    )
