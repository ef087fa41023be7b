"""Margin-aware verification of greedy drafts in two Triton launches that read each row once.

The rule is the one of `reference` (arXiv 2601.15498, Section 3). Symbols: V vocabulary, N draft
positions, B requests, R = N + B rows that are read (N without `bonus_rows`), S splits of a row.

    top2_kernel    grid (R, S)   z1 with its id, and z2, of each split of a row: see `top2`
    accept_kernel  grid (B,)     joins the splits of one request's rows, applies the rule, and
                                 writes the request's outputs
    judge_kernel   grid (B,)     in its place for `judge_positions`: writes the verdicts alone

Bytes moved: the rows once, one logit of each draft token again, the partial results of `top2`, and
the outputs. Not materialised: anything of the logits' size.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.terms import (
    Drafts,
    Judgement,
    Margin,
    Verdict,
    VerifyOutput,
    new_output,
)
from vllm_mars.kernels.top2 import reduce_rows, reduce_splits, unpack_id
from vllm_mars.kernels.verdicts import store_values, verdicts_at, within_budget

# Small index arrays, often views that start anywhere: their alignment would multiply the compiled
# variants and gain nothing.
_UNALIGNED = [
    "output_token_ids_ptr",
    "num_accepted_ptr",
    "num_relaxed_ptr",
    "verdicts_ptr",
    "top2_values_ptr",
    "draft_token_ids_ptr",
    "bonus_token_ids_ptr",
    "protected_ptr",
    "blocked_ptr",
    "budget_used_ptr",
    "budget_produced_ptr",
    "target_rows_ptr",
    "cu_num_draft_tokens_ptr",
    "theta",
    "gap",
]
# Small batches share variants: fewer than 8 positions cost no less.
_MIN_POSITIONS = 8

_RELAXED = tl.constexpr(int(Verdict.RELAXED))
_FIRST = tl.constexpr(int(Verdict.FIRST))


@triton.jit(
    do_not_specialize=["num_draft", "max_draft_len", "theta", "gap", "share", "num_splits"],
    do_not_specialize_on_alignment=_UNALIGNED,
)
def accept_kernel(
    # [batch, max_draft_len + 1]
    output_token_ids_ptr,
    # [batch]
    num_accepted_ptr,
    # [batch]
    num_relaxed_ptr,
    # [num_draft, 2] or None
    top2_values_ptr,
    # [num_draft] or None
    verdicts_ptr,
    # [num_rows, num_splits]
    best_ptr,
    # [num_rows, num_splits]
    second_ptr,
    # [*, vocab]
    logits_ptr,
    logits_stride,
    # [num_draft]
    draft_token_ids_ptr,
    # [batch]
    bonus_token_ids_ptr,
    # [vocab] or None
    protected_ptr,
    # [num_draft] or None
    blocked_ptr,
    # [batch] or None
    budget_used_ptr,
    # [batch] or None
    budget_produced_ptr,
    # [num_draft] or None
    target_rows_ptr,
    # [batch], inclusive prefix sum
    cu_num_draft_tokens_ptr,
    # float, or [batch]
    theta,
    # float, or [batch]
    gap,
    # of the budget, in units of 2**-SHARE_BITS
    share,
    num_draft,
    max_draft_len,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    POSITIONS: tl.constexpr,
    HAS_TARGET_ROWS: tl.constexpr,
    HAS_PROTECTED: tl.constexpr,
    HAS_BLOCKED: tl.constexpr,
    HAS_BUDGET: tl.constexpr,
    # "no"; "ids" or "rows" as given; "last": a request's last row is its bonus row, and a row's
    # draft token stands one entry behind it.
    BONUS: tl.constexpr,
    THETA_PER_REQUEST: tl.constexpr,
    GAP_PER_REQUEST: tl.constexpr,
    WITH_VERDICTS: tl.constexpr,
    # The margin accepts nothing: verdicts alone tell what it would.
    DRY_RUN: tl.constexpr,
):
    request = tl.program_id(0)
    end = tl.load(cu_num_draft_tokens_ptr + request)
    start = tl.load(cu_num_draft_tokens_ptr + request - 1, mask=request > 0, other=0)
    if THETA_PER_REQUEST:
        theta = tl.load(theta + request)
    if GAP_PER_REQUEST:
        gap = tl.load(gap + request)
    offset = tl.arange(0, POSITIONS)
    position = start + offset
    is_row = position < end
    if BONUS == "last":
        # Never accepted, the bonus row emits its argmax like a row whose draft is rejected.
        is_draft = position < end - 1
        draft_token_ids_ptr += 1
    else:
        is_draft = is_row

    draft, verdict, first, second, argmax = verdicts_at(
        best_ptr,
        second_ptr,
        logits_ptr,
        logits_stride,
        draft_token_ids_ptr,
        protected_ptr,
        blocked_ptr,
        target_rows_ptr,
        position,
        is_row,
        is_draft,
        theta,
        gap,
        vocab,
        num_splits,
        SPLITS,
        HAS_TARGET_ROWS,
        HAS_PROTECTED,
        HAS_BLOCKED,
    )
    strict = is_draft & (draft == argmax)
    verdict = tl.where(strict, _FIRST, verdict)
    if HAS_BUDGET:
        used = tl.load(budget_used_ptr + request)
        produced = tl.load(budget_produced_ptr + request).to(tl.int64)
        verdict, _ = within_budget(verdict, offset, used, produced, share)
    relaxed = verdict == _RELAXED
    if DRY_RUN:
        relaxed = relaxed & False
    length = end - start
    accepted = tl.min(tl.where(is_row & ~(strict | relaxed), offset, length), axis=0)
    kept = offset < accepted
    num_relaxed = tl.sum((kept & relaxed).to(tl.int32), axis=0)

    token = tl.where(kept, draft, -1)
    token = tl.where(is_row & (offset == accepted), argmax.to(tl.int64), token)
    if BONUS == "ids":
        bonus = tl.load(bonus_token_ids_ptr + request).to(tl.int64)
        token = tl.where((offset == length) & (accepted == length), bonus, token)
    if BONUS == "rows":
        row = num_draft + request + tl.zeros([1], tl.int32)
        of_bonus, _ = reduce_splits(best_ptr, second_ptr, row, row >= 0, num_splits, SPLITS)
        bonus = tl.max(unpack_id(of_bonus), axis=0).to(tl.int64)
        token = tl.where((offset == length) & (accepted == length), bonus, token)
    tl.store(
        output_token_ids_ptr + request.to(tl.int64) * (max_draft_len + 1) + offset,
        token.to(output_token_ids_ptr.dtype.element_ty),
        mask=offset <= max_draft_len,
    )
    tl.store(num_accepted_ptr + request, accepted)
    tl.store(num_relaxed_ptr + request, num_relaxed)
    if WITH_VERDICTS:
        store_values(top2_values_ptr, position, first, second, is_row)
        tl.store(verdicts_ptr + position, verdict.to(tl.int8), mask=is_row)


@triton.jit(
    do_not_specialize=["theta", "gap", "share", "num_splits"],
    do_not_specialize_on_alignment=_UNALIGNED,
)
def judge_kernel(
    # [num_draft]
    verdicts_ptr,
    # [num_draft, 2] or None
    top2_values_ptr,
    # [num_rows, num_splits]
    best_ptr,
    # [num_rows, num_splits]
    second_ptr,
    # [*, vocab]
    logits_ptr,
    logits_stride,
    # [num_draft]
    draft_token_ids_ptr,
    # [vocab] or None
    protected_ptr,
    # [num_draft] or None
    blocked_ptr,
    # [batch] or None
    budget_used_ptr,
    # [batch] or None
    budget_produced_ptr,
    # [num_draft] or None
    target_rows_ptr,
    # [batch], inclusive prefix sum
    cu_num_draft_tokens_ptr,
    # float, or [batch]
    theta,
    # float, or [batch]
    gap,
    # of the budget, in units of 2**-SHARE_BITS
    share,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    POSITIONS: tl.constexpr,
    HAS_TARGET_ROWS: tl.constexpr,
    HAS_PROTECTED: tl.constexpr,
    HAS_BLOCKED: tl.constexpr,
    HAS_BUDGET: tl.constexpr,
    THETA_PER_REQUEST: tl.constexpr,
    GAP_PER_REQUEST: tl.constexpr,
    WITH_VALUES: tl.constexpr,
):
    request = tl.program_id(0)
    end = tl.load(cu_num_draft_tokens_ptr + request)
    start = tl.load(cu_num_draft_tokens_ptr + request - 1, mask=request > 0, other=0)
    if THETA_PER_REQUEST:
        theta = tl.load(theta + request)
    if GAP_PER_REQUEST:
        gap = tl.load(gap + request)
    if HAS_BUDGET:
        used = tl.load(budget_used_ptr + request)
        produced = tl.load(budget_produced_ptr + request).to(tl.int64)
    offset = tl.arange(0, POSITIONS)
    # The longest draft is not known on the host: a request's positions go in blocks.
    for block in range(0, end - start, POSITIONS):
        position = start + block + offset
        is_draft = position < end
        _, verdict, first, second, _ = verdicts_at(
            best_ptr,
            second_ptr,
            logits_ptr,
            logits_stride,
            draft_token_ids_ptr,
            protected_ptr,
            blocked_ptr,
            target_rows_ptr,
            position,
            is_draft,
            is_draft,
            theta,
            gap,
            vocab,
            num_splits,
            SPLITS,
            HAS_TARGET_ROWS,
            HAS_PROTECTED,
            HAS_BLOCKED,
        )
        if HAS_BUDGET:
            verdict, num_relaxed = within_budget(verdict, offset, used, produced, share)
            used += num_relaxed
            produced += POSITIONS
        tl.store(verdicts_ptr + position, verdict.to(tl.int8), mask=is_draft)
        if WITH_VALUES:
            store_values(top2_values_ptr, position, first, second, is_draft)


def num_positions(max_draft_len: int) -> int:
    """POSITIONS of `accept_kernel`: a power of 2 that holds the drafts and the bonus token."""
    return max(_MIN_POSITIONS, triton.next_power_of_2(max_draft_len + 1))


def _shared_arguments(drafts: Drafts, margin: Margin) -> dict[str, Any]:
    """Launches `top2_kernel`; returns what `accept_kernel` and `judge_kernel` both take."""
    best, second, num_splits, padded_splits = reduce_rows(drafts)
    budget = margin.budget
    return {
        "best_ptr": best,
        "second_ptr": second,
        "logits_ptr": drafts.logits,
        "logits_stride": drafts.logits.stride(0),
        "draft_token_ids_ptr": drafts.draft_token_ids,
        "protected_ptr": margin.protected,
        "blocked_ptr": margin.blocked,
        "budget_used_ptr": None if budget is None else budget.num_relaxed,
        "budget_produced_ptr": None if budget is None else budget.num_output_tokens,
        "target_rows_ptr": drafts.target_rows,
        "cu_num_draft_tokens_ptr": drafts.cu_num_draft_tokens,
        "theta": margin.theta,
        "gap": margin.gap,
        "share": 0 if budget is None else budget.share_units,
        "vocab": drafts.logits.shape[1],
        "num_splits": num_splits,
        "SPLITS": padded_splits,
        "HAS_TARGET_ROWS": drafts.target_rows is not None,
        "HAS_PROTECTED": margin.protected is not None,
        "HAS_BLOCKED": margin.blocked is not None,
        "HAS_BUDGET": budget is not None,
        "THETA_PER_REQUEST": isinstance(margin.theta, torch.Tensor),
        "GAP_PER_REQUEST": isinstance(margin.gap, torch.Tensor),
        "enable_fp_fusion": False,
    }


def verify_greedy(
    drafts: Drafts,
    margin: Margin,
    with_verdicts: bool = False,
    dry_run: bool = False,
    out: VerifyOutput | None = None,
) -> VerifyOutput:
    """The Triton form of `vllm_mars.verify_greedy` and `vllm_mars.verify.verify_input_tokens`."""
    batch = drafts.cu_num_draft_tokens.shape[0]
    if out is None:
        token_dtype = torch.int64 if drafts.bonus_row_is_last else torch.int32
        out = new_output(drafts, with_verdicts, token_dtype)
    if not batch:
        return out
    if drafts.bonus_row_is_last:
        bonus = "last"
    elif drafts.bonus_rows is not None:
        bonus = "rows"
    else:
        bonus = "no" if drafts.bonus_token_ids is None else "ids"
    accept_kernel[(batch,)](
        output_token_ids_ptr=out.output_token_ids,
        num_accepted_ptr=out.num_accepted,
        num_relaxed_ptr=out.num_relaxed,
        top2_values_ptr=out.top2_values,
        verdicts_ptr=out.verdicts,
        bonus_token_ids_ptr=drafts.bonus_token_ids,
        num_draft=drafts.draft_token_ids.shape[0],
        max_draft_len=drafts.max_draft_len,
        POSITIONS=num_positions(drafts.max_draft_len),
        BONUS=bonus,
        WITH_VERDICTS=with_verdicts,
        DRY_RUN=dry_run,
        **_shared_arguments(drafts, margin),
    )
    return out


def judge_positions(drafts: Drafts, margin: Margin, with_top2_values: bool = False) -> Judgement:
    """The Triton form of `vllm_mars.verify.judge_positions`."""
    num_draft = drafts.draft_token_ids.shape[0]
    device = drafts.logits.device
    verdicts = torch.empty(num_draft, dtype=torch.int8, device=device)
    values = torch.empty((num_draft, 2), device=device) if with_top2_values else None
    if num_draft:
        judge_kernel[(drafts.cu_num_draft_tokens.shape[0],)](
            verdicts_ptr=verdicts,
            top2_values_ptr=values,
            POSITIONS=_MIN_POSITIONS,
            WITH_VALUES=with_top2_values,
            **_shared_arguments(drafts, margin),
        )
    return Judgement(verdicts, values)
