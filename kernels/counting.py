"""Counts of verified positions in one launch: see `vllm_mars.runner.counters.CounterLayout`."""

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.terms import COUNTS, Drafts, Judgement, Margin, Verdict

_RELAXED = tl.constexpr(int(Verdict.RELAXED))
_PROTECTED = tl.constexpr(int(Verdict.PROTECTED))
_LAST_REFUSAL = tl.constexpr(int(Verdict.REPEAT))
# Positions of a request go in blocks of this many.
_POSITIONS = 8
_UNALIGNED = [
    "top2_values_ptr",
    "verdicts_ptr",
    "losses_ptr",
    "num_accepted_ptr",
    "draft_token_ids_ptr",
    "cu_num_draft_tokens_ptr",
    "theta",
    "gap",
]


@triton.jit(
    do_not_specialize=["theta", "gap", *(f"{name}_start" for name in COUNTS)],
    do_not_specialize_on_alignment=_UNALIGNED,
)
def count_kernel(
    # [layout.size] int64
    counts_ptr,
    # [num_draft, 2]
    top2_values_ptr,
    # [num_draft]
    verdicts_ptr,
    # [num_draft]
    losses_ptr,
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
    # Where each of `COUNTS` begins.
    verified_start,
    accepted_start,
    relaxed_start,
    low_margin_start,
    ratio_start,
    ratio_sum_start,
    lost_start,
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

        tl.atomic_add(counts_ptr + verified_start + offset, one, mask=is_verified)
        tl.atomic_add(counts_ptr + accepted_start + offset, one, mask=is_accepted)
        # Launched without fusion, so that theta * z1 is rounded before gap is taken off.
        is_low = is_verified & (second > theta * first - gap)
        tl.atomic_add(counts_ptr + low_margin_start + offset, one, mask=is_low)
        if not DRY_RUN:
            is_relaxed = is_accepted & (verdict == _RELAXED)
            tl.atomic_add(counts_ptr + relaxed_start + offset, one, mask=is_relaxed)
            loss = tl.load(losses_ptr + position, mask=is_relaxed, other=0).to(tl.int64)
            tl.atomic_add(counts_ptr + lost_start, tl.sum(loss, axis=0))
            is_refused = is_verified & (verdict >= _PROTECTED) & (verdict <= _LAST_REFUSAL)
            refusal = verdict.to(tl.int32) - _PROTECTED
            tl.atomic_add(counts_ptr + refused_start + refusal, one, mask=is_refused)

        ratio = tl.div_rn(second, first)
        has_ratio = is_verified & (first > 0.0) & (ratio == ratio)
        ratio = tl.where(has_ratio, ratio, 0.0)
        bucket = tl.sum((ratio[:, None] > edges[None, :]).to(tl.int32), axis=1)
        tl.atomic_add(counts_ptr + ratio_start + bucket, one, mask=has_ratio)
        clamped = tl.minimum(tl.maximum(ratio, 0.0), 1.0)
        total = tl.sum(tl.floor(clamped * units + 0.5).to(tl.int64), axis=0)
        tl.atomic_add(counts_ptr + ratio_sum_start, total)


def count_positions(
    drafts: Drafts,
    judgement: Judgement,
    num_accepted: torch.Tensor,
    margin: Margin,
    *,
    dry_run: bool,
    counts: torch.Tensor,
    starts: tuple[int, ...],
    ratio_edges: torch.Tensor,
    ratio_unit: float,
) -> None:
    """Launches `count_kernel`.

    Args:
        drafts: the step's; its logits are not read.
        judgement: of the drafts, with the values of the top 2 and the losses.
        num_accepted: `[batch]` int32.
        margin: its theta and gap say which positions are low-margin.
        dry_run: whether nothing counts as relaxed or refused.
        counts: int64, added into.
        starts: where each of `COUNTS` begins in it.
        ratio_edges: `[num_edges]` float32, upper edges of the histogram, inclusive.
        ratio_unit: one unit of the sum of ratios.
    """
    count_kernel[(num_accepted.shape[0],)](
        counts,
        judgement.top2_values,
        judgement.verdicts,
        judgement.losses,
        num_accepted,
        drafts.draft_token_ids,
        drafts.cu_num_draft_tokens,
        ratio_edges,
        margin.theta,
        margin.gap,
        *starts,
        ratio_edges.shape[0],
        1 / ratio_unit,
        EDGES=triton.next_power_of_2(ratio_edges.shape[0]),
        POSITIONS=_POSITIONS,
        THETA_PER_REQUEST=isinstance(margin.theta, torch.Tensor),
        GAP_PER_REQUEST=isinstance(margin.gap, torch.Tensor),
        DRY_RUN=dry_run,
        enable_fp_fusion=False,
        num_warps=1,
    )
