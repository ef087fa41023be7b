"""Margin-aware verification of greedy drafts in two Triton launches that read each row once.

The rule is the one of `reference` (arXiv 2601.15498, Section 3). Symbols: V vocabulary, N draft
positions, B requests, R = N + B rows that are read (N without `bonus_rows`), S splits of a row.

    top2_kernel    grid (R, S)   z1 with its id, and z2, of each split of a row: see `top2`
    accept_kernel  grid (B,)     joins the splits of one request's rows, applies the rule, and
                                 writes the request's outputs
    mark_kernel    grid (B,)     in its place for `relaxed_positions`: writes relaxed(x) alone

Bytes moved: the rows once, one logit of each draft token again, the partial results of `top2`, and
the outputs. Not materialised: anything of the logits' size.
"""

import torch
import triton
import triton.language as tl
from vllm_mars.kernels.reference import VerifyOutput, new_output
from vllm_mars.kernels.top2 import reduce_rows, reduce_splits, unpack_id, unpack_value

# Small index arrays, often views that start anywhere: their alignment would multiply the compiled
# variants and gain nothing.
_UNALIGNED = [
    "output_token_ids_ptr",
    "num_accepted_ptr",
    "num_relaxed_ptr",
    "relaxed_ptr",
    "top2_values_ptr",
    "top2_ids_ptr",
    "draft_token_ids_ptr",
    "bonus_token_ids_ptr",
    "protected_ptr",
    "target_rows_ptr",
    "cu_num_draft_tokens_ptr",
    "theta",
    "gap",
]
# Small batches share variants: fewer than 8 positions cost no less.
_MIN_POSITIONS = 8


@triton.jit
def _judge(
    best_ptr,
    second_ptr,
    logits_ptr,
    logits_stride,
    draft_token_ids_ptr,
    protected_ptr,
    target_rows_ptr,
    position,
    is_row,
    is_draft,
    theta,
    gap,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    HAS_TARGET_ROWS: tl.constexpr,
    HAS_PROTECTED: tl.constexpr,
    WITH_TOP2: tl.constexpr,
):
    """Draft token, relaxed(x), and the top 2 (values, then ids) at each given position."""
    packed, second, second_id = reduce_splits(
        best_ptr, second_ptr, position, is_row, num_splits, vocab, SPLITS, WITH_TOP2
    )
    first = unpack_value(packed)
    argmax = unpack_id(packed)
    draft = tl.load(draft_token_ids_ptr + position, mask=is_draft, other=-1).to(tl.int64)
    if HAS_TARGET_ROWS:
        row = tl.load(target_rows_ptr + position, mask=is_draft, other=0).to(tl.int64)
    else:
        row = position.to(tl.int64)
    in_vocab = is_draft & (draft >= 0) & (draft < vocab)
    draft_logit = tl.load(
        logits_ptr + row * logits_stride + draft, mask=in_vocab, other=float("-inf")
    ).to(tl.float32)
    theta = theta + tl.zeros(first.shape, tl.float32)
    # Launched without fusion, so that theta * z1 is rounded before gap is taken off, as in torch.
    threshold = theta * first - gap
    relaxed = in_vocab & (draft_logit >= second) & (second > threshold)
    relaxed = relaxed & ((theta == 1.0) | (first > 0.0))
    if HAS_PROTECTED:
        of_draft = tl.load(protected_ptr + draft, mask=in_vocab, other=0)
        of_argmax = tl.load(protected_ptr + argmax, mask=in_vocab, other=0)
        relaxed = relaxed & (of_draft == 0) & (of_argmax == 0)
    return draft, relaxed, first, second, argmax, second_id


@triton.jit(
    do_not_specialize=["num_draft", "max_draft_len", "theta", "gap", "num_splits"],
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
    # [num_draft, 2] or None
    top2_ids_ptr,
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
    target_rows_ptr,
    # [batch], inclusive prefix sum
    cu_num_draft_tokens_ptr,
    # float, or [batch]
    theta,
    # float, or [batch]
    gap,
    num_draft,
    max_draft_len,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    POSITIONS: tl.constexpr,
    HAS_TARGET_ROWS: tl.constexpr,
    HAS_PROTECTED: tl.constexpr,
    # "no"; "ids" or "rows" as given; "last": a request's last row is its bonus row, and a row's
    # draft token stands one entry behind it.
    BONUS: tl.constexpr,
    THETA_PER_REQUEST: tl.constexpr,
    GAP_PER_REQUEST: tl.constexpr,
    WITH_TOP2: tl.constexpr,
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

    draft, relaxed, first, second, argmax, second_id = _judge(
        best_ptr,
        second_ptr,
        logits_ptr,
        logits_stride,
        draft_token_ids_ptr,
        protected_ptr,
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
        WITH_TOP2,
    )
    strict = is_draft & (draft == argmax)
    length = end - start
    accepted = tl.min(tl.where(is_row & ~(strict | relaxed), offset, length), axis=0)
    kept = offset < accepted
    num_relaxed = tl.sum((kept & relaxed & ~strict).to(tl.int32), axis=0)

    token = tl.where(kept, draft, -1)
    token = tl.where(is_row & (offset == accepted), argmax.to(tl.int64), token)
    if BONUS == "ids":
        bonus = tl.load(bonus_token_ids_ptr + request).to(tl.int64)
        token = tl.where((offset == length) & (accepted == length), bonus, token)
    if BONUS == "rows":
        row = num_draft + request + tl.zeros([1], tl.int32)
        of_bonus, _, _ = reduce_splits(
            best_ptr, second_ptr, row, row >= 0, num_splits, vocab, SPLITS, WITH_TOP2
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
    if WITH_TOP2:
        tl.store(top2_values_ptr + 2 * position, first, mask=is_row)
        tl.store(top2_values_ptr + 2 * position + 1, second, mask=is_row)
        tl.store(top2_ids_ptr + 2 * position, argmax, mask=is_row)
        tl.store(top2_ids_ptr + 2 * position + 1, second_id, mask=is_row)


@triton.jit(
    do_not_specialize=["theta", "gap", "num_splits"], do_not_specialize_on_alignment=_UNALIGNED
)
def mark_kernel(
    # [num_draft]
    relaxed_ptr,
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
    target_rows_ptr,
    # [batch], inclusive prefix sum
    cu_num_draft_tokens_ptr,
    # float, or [batch]
    theta,
    # float, or [batch]
    gap,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    POSITIONS: tl.constexpr,
    HAS_TARGET_ROWS: tl.constexpr,
    HAS_PROTECTED: tl.constexpr,
    THETA_PER_REQUEST: tl.constexpr,
    GAP_PER_REQUEST: tl.constexpr,
):
    request = tl.program_id(0)
    end = tl.load(cu_num_draft_tokens_ptr + request)
    start = tl.load(cu_num_draft_tokens_ptr + request - 1, mask=request > 0, other=0)
    if THETA_PER_REQUEST:
        theta = tl.load(theta + request)
    if GAP_PER_REQUEST:
        gap = tl.load(gap + request)
    # The longest draft is not known on the host: a request's positions go in blocks.
    for block in range(0, end - start, POSITIONS):
        position = start + block + tl.arange(0, POSITIONS)
        is_draft = position < end
        _, relaxed, _, _, _, _ = _judge(
            best_ptr,
            second_ptr,
            logits_ptr,
            logits_stride,
            draft_token_ids_ptr,
            protected_ptr,
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
            False,
        )
        tl.store(relaxed_ptr + position, relaxed, mask=is_draft)


def num_positions(max_draft_len: int) -> int:
    """POSITIONS of `accept_kernel`: a power of 2 that holds the drafts and the bonus token."""
    return max(_MIN_POSITIONS, triton.next_power_of_2(max_draft_len + 1))


def verify_greedy(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    bonus_token_ids: torch.Tensor | None,
    theta: float | torch.Tensor,
    gap: float | torch.Tensor,
    protected: torch.Tensor | None,
    target_rows: torch.Tensor | None,
    bonus_rows: torch.Tensor | None,
    max_draft_len: int,
    with_top2: bool = False,
    out: VerifyOutput | None = None,
    bonus_row_is_last: bool = False,
) -> VerifyOutput:
    """The Triton form of `vllm_mars.verify_greedy`, which documents the arguments.

    With `bonus_row_is_last` it is that of `vllm_mars.verify.verify_input_tokens`: draft_token_ids
    are input tokens, and cu_num_draft_tokens counts the rows of each request, its bonus row too.
    """
    batch = cu_num_draft_tokens.shape[0]
    num_draft = draft_token_ids.shape[0]
    if out is None:
        out = new_output(batch, max_draft_len, num_draft if with_top2 else None, logits.device)
    if not batch:
        return out
    if bonus_row_is_last:
        bonus = "last"
    elif bonus_rows is not None:
        bonus = "rows"
    else:
        bonus = "no" if bonus_token_ids is None else "ids"
    best, second, num_splits, padded_splits = reduce_rows(
        logits,
        target_rows,
        bonus_rows,
        num_draft,
        num_draft + (0 if bonus_rows is None else batch),
        with_top2,
    )
    accept_kernel[(batch,)](
        out.output_token_ids,
        out.num_accepted,
        out.num_relaxed,
        out.top2_values,
        out.top2_ids,
        best,
        second,
        logits,
        logits.stride(0),
        draft_token_ids,
        bonus_token_ids,
        protected,
        target_rows,
        cu_num_draft_tokens,
        theta,
        gap,
        num_draft,
        max_draft_len,
        logits.shape[1],
        num_splits,
        SPLITS=padded_splits,
        POSITIONS=num_positions(max_draft_len),
        HAS_TARGET_ROWS=target_rows is not None,
        HAS_PROTECTED=protected is not None,
        BONUS=bonus,
        THETA_PER_REQUEST=isinstance(theta, torch.Tensor),
        GAP_PER_REQUEST=isinstance(gap, torch.Tensor),
        WITH_TOP2=with_top2,
        enable_fp_fusion=False,
    )
    return out


def relaxed_positions(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    theta: float | torch.Tensor,
    gap: float | torch.Tensor,
    protected: torch.Tensor | None,
    target_rows: torch.Tensor | None,
) -> torch.Tensor:
    """The Triton form of `vllm_mars.verify.relaxed_positions`, which documents the arguments."""
    num_draft = draft_token_ids.shape[0]
    relaxed = torch.empty(num_draft, dtype=torch.bool, device=logits.device)
    if not num_draft:
        return relaxed
    best, second, num_splits, padded_splits = reduce_rows(
        logits, target_rows, None, num_draft, num_draft
    )
    mark_kernel[(cu_num_draft_tokens.shape[0],)](
        relaxed,
        best,
        second,
        logits,
        logits.stride(0),
        draft_token_ids,
        protected,
        target_rows,
        cu_num_draft_tokens,
        theta,
        gap,
        logits.shape[1],
        num_splits,
        SPLITS=padded_splits,
        POSITIONS=_MIN_POSITIONS,
        HAS_TARGET_ROWS=target_rows is not None,
        HAS_PROTECTED=protected is not None,
        THETA_PER_REQUEST=isinstance(theta, torch.Tensor),
        GAP_PER_REQUEST=isinstance(gap, torch.Tensor),
        enable_fp_fusion=False,
    )
    return relaxed
