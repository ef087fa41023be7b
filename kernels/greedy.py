"""Margin-aware verification of greedy drafts in two Triton launches that read each row once.

The rule is the one of `reference` (arXiv 2601.15498, Section 3). Symbols: V vocabulary, N draft
positions, B requests, R = N + B rows that are read (N without `bonus_rows`), S splits of a row.

    top2_kernel    grid (R, S)   z1 with its id, and z2, of each split of a row: see `top2`
    accept_kernel  grid (B,)     joins the splits of one request's rows, applies the rule, and
                                 writes the request's outputs, or for `judge_positions` the
                                 verdicts alone

With a price and no verdicts asked for, z2 is neither looked for nor stored.

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
    share_units,
)
from vllm_mars.kernels.top2 import reduce_splits, unpack_id
from vllm_mars.kernels.verdicts import (
    price_of,
    row_arguments,
    rows_at,
    store_values,
    up_to_best_stop,
    verdicts_at,
    within_budgets,
)

# Small index arrays, often views that start anywhere: their alignment would multiply the compiled
# variants and gain nothing.
_UNALIGNED = [
    *("output_token_ids_ptr", "num_accepted_ptr", "num_relaxed_ptr", "lost_ptr"),
    *("verdicts_ptr", "top2_values_ptr", "losses_ptr"),
    *("draft_token_ids_ptr", "bonus_token_ids_ptr", "target_rows_ptr", "cu_num_draft_tokens_ptr"),
    *("protected_ptr", "blocked_ptr"),
    *("budget_used_ptr", "budget_lost_ptr", "budget_produced_ptr"),
    *("theta", "gap", "price", "rate"),
]
# Values that change from step to step or server to server, and would each be a variant.
_UNSPECIALIZED = ["theta", "gap", "price", "share", "rate", "burst", "num_splits"]
# Small batches share variants: fewer than 8 positions cost no less.
_MIN_POSITIONS = 8

_RELAXED = tl.constexpr(int(Verdict.RELAXED))
_FIRST = tl.constexpr(int(Verdict.FIRST))


@triton.jit(
    do_not_specialize=["num_draft", "max_draft_len", *_UNSPECIALIZED],
    do_not_specialize_on_alignment=_UNALIGNED,
)
def accept_kernel(
    # [batch, max_draft_len + 1], and three of [batch]; None for verdicts alone
    output_token_ids_ptr,
    num_accepted_ptr,
    num_relaxed_ptr,
    lost_ptr,
    # [num_draft, 2] or None
    top2_values_ptr,
    # [num_draft] or None
    verdicts_ptr,
    # [num_draft] or None
    losses_ptr,
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
    budget_lost_ptr,
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
    # in units of 2**-LOSS_BITS nats, or [batch] in nats
    price,
    # of the budgets, in units of 2**-SHARE_BITS; the rate may be [batch]
    share,
    rate,
    # in units of 2**-LOSS_BITS nats
    burst,
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
    HAS_LOSS_BUDGET: tl.constexpr,
    HAS_PRICE: tl.constexpr,
    # "no"; "ids" or "rows" as given; "last": a request's last row is its bonus row, and a row's
    # draft token stands one entry behind it.
    BONUS: tl.constexpr,
    THETA_PER_REQUEST: tl.constexpr,
    GAP_PER_REQUEST: tl.constexpr,
    PRICE_PER_REQUEST: tl.constexpr,
    RATE_PER_REQUEST: tl.constexpr,
    WITH_SECOND: tl.constexpr,
    WITH_VERDICTS: tl.constexpr,
    # The margin accepts nothing: verdicts alone tell what it would.
    DRY_RUN: tl.constexpr,
    # Each position by itself, for verdicts alone.
    ALONE: tl.constexpr,
):
    request = tl.program_id(0)
    end = tl.load(cu_num_draft_tokens_ptr + request)
    start = tl.load(cu_num_draft_tokens_ptr + request - 1, mask=request > 0, other=0)
    if THETA_PER_REQUEST:
        theta = tl.load(theta + request)
    if GAP_PER_REQUEST:
        gap = tl.load(gap + request)
    if HAS_PRICE:
        price = price_of(price, request, PRICE_PER_REQUEST)
    # What the request starts this step with.
    produced = tl.zeros([], tl.int64)
    left_to_relax = tl.zeros([], tl.int64)
    left_to_lose = tl.zeros([], tl.int64)
    if HAS_BUDGET or HAS_LOSS_BUDGET:
        produced = tl.load(budget_produced_ptr + request).to(tl.int64)
    if HAS_BUDGET:
        left_to_relax -= tl.load(budget_used_ptr + request)
    if HAS_LOSS_BUDGET:
        left_to_lose += burst - tl.load(budget_lost_ptr + request)
        if RATE_PER_REQUEST:
            rate = tl.load(rate + request)
    offset = tl.arange(0, POSITIONS)
    position = start + offset
    is_row = position < end
    if BONUS == "last":
        # Never accepted, the bonus row emits its argmax like a row whose draft is rejected.
        is_draft = position < end - 1
        draft_token_ids_ptr += 1
    else:
        is_draft = is_row

    draft, verdict, loss, first, second, argmax = verdicts_at(
        best_ptr,
        second_ptr,
        logits_ptr,
        logits_stride,
        draft_token_ids_ptr,
        protected_ptr,
        blocked_ptr,
        position,
        position,
        rows_at(target_rows_ptr, position, is_draft, HAS_TARGET_ROWS),
        is_row,
        is_draft,
        theta,
        gap,
        price,
        vocab,
        num_splits,
        SPLITS,
        HAS_PROTECTED,
        HAS_BLOCKED,
        HAS_PRICE,
        WITH_SECOND,
        ALONE,
    )
    length = end - start
    if HAS_BUDGET or HAS_LOSS_BUDGET:
        verdict = within_budgets(
            verdict,
            loss,
            offset,
            length,
            produced,
            left_to_relax,
            left_to_lose,
            share,
            rate,
            HAS_BUDGET,
            HAS_LOSS_BUDGET,
        )
    if not ALONE:
        if HAS_PRICE:
            verdict = up_to_best_stop(verdict, loss, offset, is_row, length, price)
        strict = verdict == _FIRST
        is_relaxed = verdict == _RELAXED
        if DRY_RUN:
            is_relaxed = is_relaxed & False
        accepted = tl.min(tl.where(is_row & ~(strict | is_relaxed), offset, length), axis=0)
        kept = offset < accepted
        num_relaxed = tl.sum((kept & is_relaxed).to(tl.int32), axis=0)
        sum_lost = tl.sum(tl.where(kept & is_relaxed, loss, 0), axis=0)

        token = tl.where(kept, draft, -1)
        token = tl.where(is_row & (offset == accepted), argmax.to(tl.int64), token)
        if BONUS == "ids":
            bonus = tl.load(bonus_token_ids_ptr + request).to(tl.int64)
            token = tl.where((offset == length) & (accepted == length), bonus, token)
        if BONUS == "rows":
            row = num_draft + request + tl.zeros([1], tl.int32)
            of_bonus, _ = reduce_splits(
                best_ptr, second_ptr, row, row >= 0, num_splits, SPLITS, WITH_SECOND
            )
            bonus = tl.max(unpack_id(of_bonus), axis=0).to(tl.int64)
            token = tl.where((offset == length) & (accepted == length), bonus, token)
        tl.store(
            output_token_ids_ptr + request.to(tl.int64) * (max_draft_len + 1) + offset,
            token.to(output_token_ids_ptr.dtype.element_ty),
            mask=offset <= max_draft_len,
        )
        tl.store(num_accepted_ptr + request, accepted)
        tl.store(num_relaxed_ptr + request, num_relaxed)
        tl.store(lost_ptr + request, sum_lost)
    if top2_values_ptr is not None:
        store_values(top2_values_ptr, position, first, second, is_row)
    if WITH_VERDICTS:
        tl.store(verdicts_ptr + position, verdict.to(tl.int8), mask=is_row)
        tl.store(losses_ptr + position, loss.to(tl.int32), mask=is_row)


def num_positions(max_draft_len: int) -> int:
    """POSITIONS of `accept_kernel`: a power of 2 that holds the drafts and the bonus token."""
    return max(_MIN_POSITIONS, triton.next_power_of_2(max_draft_len + 1))


def _limit_arguments(drafts: Drafts, margin: Margin) -> dict[str, Any]:
    """What `accept_kernel` takes of limits."""
    budget, nats = margin.budget, margin.loss_budget
    either = budget if nats is None else nats
    return {
        "blocked_ptr": margin.blocked,
        "budget_used_ptr": None if budget is None else budget.num_relaxed,
        "budget_lost_ptr": None if nats is None else nats.lost,
        "budget_produced_ptr": None if either is None else either.num_output_tokens,
        "target_rows_ptr": drafts.target_rows,
        "share": 0 if budget is None else share_units(budget.share),
        "rate": 0 if nats is None else nats.rate,
        "burst": 0 if nats is None else nats.burst,
        "HAS_TARGET_ROWS": drafts.target_rows is not None,
        "HAS_BLOCKED": margin.blocked is not None,
        "HAS_BUDGET": budget is not None,
        "HAS_LOSS_BUDGET": nats is not None,
        "RATE_PER_REQUEST": nats is not None and isinstance(nats.rate, torch.Tensor),
    }


def verify_greedy(
    drafts: Drafts,
    margin: Margin,
    with_verdicts: bool = False,
    dry_run: bool = False,
    out: VerifyOutput | None = None,
) -> VerifyOutput:
    """The Triton form of `vllm_mars.verify.verify_drafts`."""
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
        lost_ptr=out.lost,
        top2_values_ptr=out.top2_values if with_verdicts else None,
        verdicts_ptr=out.verdicts,
        losses_ptr=out.losses,
        bonus_token_ids_ptr=drafts.bonus_token_ids,
        num_draft=drafts.draft_token_ids.shape[0],
        max_draft_len=drafts.max_draft_len,
        POSITIONS=num_positions(drafts.max_draft_len),
        BONUS=bonus,
        WITH_VERDICTS=with_verdicts,
        DRY_RUN=dry_run,
        ALONE=False,
        **row_arguments(drafts, margin, with_verdicts),
        **_limit_arguments(drafts, margin),
    )
    return out


def judge_positions(drafts: Drafts, margin: Margin, with_top2_values: bool = False) -> Judgement:
    """The Triton form of `vllm_mars.verify.judge_drafts`."""
    num_draft = drafts.draft_token_ids.shape[0]
    device = drafts.logits.device
    verdicts = torch.empty(num_draft, dtype=torch.int8, device=device)
    losses = torch.empty(num_draft, dtype=torch.int32, device=device)
    values = torch.empty((num_draft, 2), device=device) if with_top2_values else None
    if num_draft:
        accept_kernel[(drafts.cu_num_draft_tokens.shape[0],)](
            output_token_ids_ptr=None,
            num_accepted_ptr=None,
            num_relaxed_ptr=None,
            lost_ptr=None,
            top2_values_ptr=values,
            verdicts_ptr=verdicts,
            losses_ptr=losses,
            bonus_token_ids_ptr=None,
            num_draft=num_draft,
            max_draft_len=drafts.max_draft_len,
            POSITIONS=num_positions(drafts.max_draft_len),
            BONUS="no",
            WITH_VERDICTS=True,
            DRY_RUN=False,
            ALONE=True,
            **row_arguments(drafts, margin, with_top2_values),
            **_limit_arguments(drafts, margin),
        )
    return Judgement(verdicts, values, losses)
