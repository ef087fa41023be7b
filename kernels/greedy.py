"""Margin-aware verification of greedy drafts in two Triton kernels that read each logits row once.

The rule is the one of `reference` (arXiv 2601.15498, Section 3). Symbols: V vocabulary, N draft
positions, B requests, R = N + B rows that are read (N without `bonus_rows`), S splits of a row.

    top2_kernel    grid (R, S)   streams V / S logits, keeps the two largest of each lane, reduces
                                 them, and writes one partial result
    accept_kernel  grid (B,)     reduces the partials of one request's rows, applies the rule, and
                                 writes the request's outputs
    mark_kernel    grid (B,)     in its place for `relaxed_positions`: writes relaxed(x) alone

Buffers between the two: best [R, S] int64 (value and id of z1, packed), second [R, S] float32 (z2).

Bytes moved: R * V * itemsize once, plus 12 * R * S twice, plus the outputs. Not materialised:
gathered rows, float32 copies, softmax, masks of the logits' size.

Packing: a float32 maps to an int32 of the same order, NaN to the largest. It stands above the
complement of the id in an int64, so that one integer maximum finds the largest value and, of
equals, the lowest id, and a NaN wins over everything, as in torch.argmax.
"""

import torch
import triton
import triton.language as tl
from vllm_mars.kernels.reference import VerifyOutput

_WORKSPACE: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}


@triton.jit
def _pack(value, token_id):
    """Orders (value, lowest id) pairs as int64; -0.0 counts as 0.0 and NaN as the largest."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(value != value, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)


@triton.jit
def _unpack_value(packed):
    ordered = (packed >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _unpack_id(packed):
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["num_draft"])
def top2_kernel(
    # [num_rows, num_splits]
    best_ptr,
    # [num_rows, num_splits]
    second_ptr,
    # [*, vocab]
    logits_ptr,
    logits_stride,
    # [num_draft] or None
    target_rows_ptr,
    # [batch] or None
    bonus_rows_ptr,
    num_draft,
    vocab,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TARGET_ROWS: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.program_id(1)
    # int64 before the multiply: a row can start past 2**31 elements.
    if row < num_draft:
        if HAS_TARGET_ROWS:
            logits_row = tl.load(target_rows_ptr + row).to(tl.int64)
        else:
            logits_row = row.to(tl.int64)
    else:
        logits_row = tl.load(bonus_rows_ptr + row - num_draft).to(tl.int64)
    row_ptr = logits_ptr + logits_row * logits_stride

    start = split * SPLIT
    lane = tl.arange(0, BLOCK)
    # A lane that meets nothing above -inf stands for its first id.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = start + lane
    second = tl.full([BLOCK], float("-inf"), tl.float32)
    for offset in range(0, SPLIT, BLOCK):
        token_id = start + offset + lane
        # -inf is neutral to a maximum, and a masked lane's ids lie behind all real ones.
        value = tl.load(row_ptr + token_id, mask=token_id < vocab, other=float("-inf"))
        value = value.to(tl.float32)
        # Strictly larger: of equal logits the lowest id stays. The first NaN wins for good.
        better = (value > best) | ((value != value) & (best == best))
        second = tl.maximum(second, tl.where(better, best, value))
        best = tl.where(better, value, best)
        best_id = tl.where(better, token_id, best_id)

    packed = _pack(best, best_id)
    winner = tl.max(packed, axis=0)
    # z2 is the largest of what the winning lane holds second and the other lanes hold first.
    rest = tl.max(tl.where(packed == winner, second, best), axis=0)
    out = row.to(tl.int64) * tl.num_programs(1) + split
    tl.store(best_ptr + out, winner)
    tl.store(second_ptr + out, rest)


@triton.jit
def _reduce_splits(best_ptr, second_ptr, row, mask, num_splits, SPLITS: tl.constexpr):
    """z1's packed pair and z2 of each given row, from the partials of its splits."""
    splits = tl.arange(0, SPLITS)
    index = row.to(tl.int64)[:, None] * num_splits + splits[None, :]
    valid = mask[:, None] & (splits < num_splits)[None, :]
    packed = tl.load(best_ptr + index, mask=valid, other=-0x7FFFFFFFFFFFFFFF)
    seconds = tl.load(second_ptr + index, mask=valid, other=float("-inf"))
    winner = tl.max(packed, axis=1)
    firsts = tl.where(valid, _unpack_value(packed), float("-inf"))
    second = tl.max(tl.where(packed == winner[:, None], seconds, firsts), axis=1)
    return winner, second


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
    is_draft,
    theta,
    gap,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    HAS_TARGET_ROWS: tl.constexpr,
    HAS_PROTECTED: tl.constexpr,
):
    """Draft token, argmax and relaxed(x) of the rule at each given position."""
    packed, second = _reduce_splits(best_ptr, second_ptr, position, is_draft, num_splits, SPLITS)
    first = _unpack_value(packed)
    argmax = _unpack_id(packed)
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
    return draft, argmax, relaxed


@triton.jit(do_not_specialize=["num_draft", "max_draft_len", "theta", "gap"])
def accept_kernel(
    # [batch, max_draft_len + 1]
    output_token_ids_ptr,
    # [batch]
    num_accepted_ptr,
    # [batch]
    num_relaxed_ptr,
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
    BONUS: tl.constexpr,
    THETA_PER_REQUEST: tl.constexpr,
    GAP_PER_REQUEST: tl.constexpr,
):
    request = tl.program_id(0)
    end = tl.load(cu_num_draft_tokens_ptr + request)
    start = tl.load(cu_num_draft_tokens_ptr + request - 1, mask=request > 0, other=0)
    length = end - start
    if THETA_PER_REQUEST:
        theta = tl.load(theta + request)
    if GAP_PER_REQUEST:
        gap = tl.load(gap + request)
    offset = tl.arange(0, POSITIONS)
    is_draft = offset < length
    position = start + offset

    draft, argmax, relaxed = _judge(
        best_ptr,
        second_ptr,
        logits_ptr,
        logits_stride,
        draft_token_ids_ptr,
        protected_ptr,
        target_rows_ptr,
        position,
        is_draft,
        theta,
        gap,
        vocab,
        num_splits,
        SPLITS,
        HAS_TARGET_ROWS,
        HAS_PROTECTED,
    )
    strict = is_draft & (draft == argmax)
    accepted = tl.min(tl.where(is_draft & ~(strict | relaxed), offset, length), axis=0)
    kept = offset < accepted
    num_relaxed = tl.sum((kept & relaxed & ~strict).to(tl.int32), axis=0)

    token = tl.where(kept, draft, -1)
    token = tl.where(is_draft & (offset == accepted), argmax.to(tl.int64), token)
    if BONUS == "ids":
        bonus = tl.load(bonus_token_ids_ptr + request).to(tl.int64)
        token = tl.where((offset == length) & (accepted == length), bonus, token)
    if BONUS == "rows":
        row = num_draft + request + tl.zeros([1], tl.int32)
        of_bonus, _ = _reduce_splits(best_ptr, second_ptr, row, row >= 0, num_splits, SPLITS)
        bonus = tl.max(_unpack_id(of_bonus), axis=0).to(tl.int64)
        token = tl.where((offset == length) & (accepted == length), bonus, token)
    tl.store(
        output_token_ids_ptr + request.to(tl.int64) * (max_draft_len + 1) + offset,
        token.to(tl.int32),
        mask=offset <= max_draft_len,
    )
    tl.store(num_accepted_ptr + request, accepted)
    tl.store(num_relaxed_ptr + request, num_relaxed)


@triton.jit(do_not_specialize=["theta", "gap"])
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
        _, _, relaxed = _judge(
            best_ptr,
            second_ptr,
            logits_ptr,
            logits_stride,
            draft_token_ids_ptr,
            protected_ptr,
            target_rows_ptr,
            position,
            is_draft,
            theta,
            gap,
            vocab,
            num_splits,
            SPLITS,
            HAS_TARGET_ROWS,
            HAS_PROTECTED,
        )
        tl.store(relaxed_ptr + position, relaxed, mask=is_draft)


def launch_settings(vocab: int, num_rows: int) -> tuple[int, int, int]:
    """Settings of `top2_kernel`: (elements of a split, block size, warps). Not tuned on hardware.

    A block of 4,096 elements and 8 warps gives each thread 16 of them: two 16-byte loads of a
    16-bit dtype, four of float32. Few rows are split so that about 512 programs fill the chip; many
    rows take fewer splits, so that partial results stay few.
    """
    block = min(4096, triton.next_power_of_2(vocab))
    blocks = triton.cdiv(vocab, block)
    splits = max(1, min(blocks, 512 // max(1, num_rows)))
    return triton.cdiv(blocks, splits) * block, block, 8 if block >= 2048 else 4


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
) -> VerifyOutput:
    """The Triton form of `vllm_mars.verify_greedy`, which documents the arguments."""
    if with_top2:
        raise NotImplementedError("with_top2 is not in the Triton backend; take backend='torch'.")
    batch = cu_num_draft_tokens.shape[0]
    num_draft = draft_token_ids.shape[0]
    device = logits.device
    output = VerifyOutput(
        torch.empty((batch, max_draft_len + 1), dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
    )
    if not batch:
        return output
    num_rows = num_draft + (0 if bonus_rows is None else batch)
    best, second, num_splits = _reduce_rows(logits, target_rows, bonus_rows, num_draft, num_rows)
    accept_kernel[(batch,)](
        output.output_token_ids,
        output.num_accepted,
        output.num_relaxed,
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
        SPLITS=triton.next_power_of_2(num_splits),
        POSITIONS=triton.next_power_of_2(max_draft_len + 1),
        HAS_TARGET_ROWS=target_rows is not None,
        HAS_PROTECTED=protected is not None,
        BONUS="rows" if bonus_rows is not None else "ids" if bonus_token_ids is not None else "no",
        THETA_PER_REQUEST=isinstance(theta, torch.Tensor),
        GAP_PER_REQUEST=isinstance(gap, torch.Tensor),
        enable_fp_fusion=False,
    )
    return output


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
    best, second, num_splits = _reduce_rows(logits, target_rows, None, num_draft, num_draft)
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
        SPLITS=triton.next_power_of_2(num_splits),
        POSITIONS=16,
        HAS_TARGET_ROWS=target_rows is not None,
        HAS_PROTECTED=protected is not None,
        THETA_PER_REQUEST=isinstance(theta, torch.Tensor),
        GAP_PER_REQUEST=isinstance(gap, torch.Tensor),
        enable_fp_fusion=False,
    )
    return relaxed


def _reduce_rows(
    logits: torch.Tensor,
    target_rows: torch.Tensor | None,
    bonus_rows: torch.Tensor | None,
    num_draft: int,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Launches `top2_kernel`; returns its partial results and the number of splits."""
    vocab = logits.shape[1]
    split, block, warps = launch_settings(vocab, num_rows)
    num_splits = triton.cdiv(vocab, split)
    best, second = _workspace(logits.device, num_rows * num_splits)
    if num_rows:
        top2_kernel[(num_rows, num_splits)](
            best,
            second,
            logits,
            logits.stride(0),
            target_rows,
            bonus_rows,
            num_draft,
            vocab,
            SPLIT=split,
            BLOCK=block,
            HAS_TARGET_ROWS=target_rows is not None,
            num_warps=warps,
        )
    return best, second, num_splits


def _workspace(device: torch.device, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial-result buffers, kept per device and power-of-2 size: no allocation once warm."""
    size = triton.next_power_of_2(max(size, 1024))
    if (device, size) not in _WORKSPACE:
        _WORKSPACE[device, size] = (
            torch.empty(size, dtype=torch.int64, device=device),
            torch.empty(size, dtype=torch.float32, device=device),
        )
    return _WORKSPACE[device, size]
