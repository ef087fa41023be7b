"""Verification by blocks in Triton; `blocks.naive` has the rule.

    mass_kernel   grid (rows, blocks)   what a draft has reached before a row, p_i, and a block's
                                        part of S_i; not of a request's first row
    by_blocks     a device function with which `accept_kernel` decides how many tokens stay

The kernel adds to the numbers that `clip_kernel` has found of a row. It reads the rows of
target and draft once. Nothing of the logits' size is written.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from vllm_mars.kernels.constants import C
from vllm_mars.kernels.kept.fused import kept_tokens, num_kept
from vllm_mars.kernels.law.fused import load_clipped, log_probabilities, log_ratio
from vllm_mars.kernels.rows.fused import Reduced, divisor_of, draft_strides, kept_size
from vllm_mars.kernels.step import Draws

# Logits that a program reads.
_BLOCK = 8192
_UNALIGNED = ["input_ids_ptr", "row_slots_ptr", "row_places_ptr"]


@triton.jit
def _residuals(log_p, ratio, own, reach):
    """max(p_i m - q, 0) of tokens, by log2 p_i."""
    log_m = log_p + log_ratio(ratio, own)
    return tl.maximum(libdevice.exp2(reach + log_m) - libdevice.exp2(log_p + ratio), 0.0)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_UNALIGNED)
def mass_kernel(
    # [num_rows, blocks]
    masses_ptr,
    # As in `clip_kernel`
    clipped_ptr,
    logits_ptr,
    logits_stride,
    records_ptr,
    input_ids_ptr,
    protected,
    guard,
    sampling,
    row_slots_ptr,
    row_places_ptr,
    draft_stride,
    draft_step_stride,
    num_rows,
    vocab,
    BLOCK: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    own_row = tl.program_id(0)
    block = tl.program_id(1)
    place = tl.load(row_places_ptr + own_row)
    place_behind = tl.load(row_places_ptr + own_row + 1, mask=own_row + 1 < num_rows, other=0)
    # Not of a first row, nor of the bonus row.
    if (place == 0) | (place_behind == 0):
        return
    slot = tl.load(row_slots_ptr + own_row).to(tl.int64)
    drawn_at = tl.load(sampling.drawn_at + slot)
    if drawn_at == 0.0:
        return
    draft = tl.load(input_ids_ptr + own_row + 1)
    if (draft == -1) | (draft >= vocab):
        return
    reach = tl.zeros([], tl.float32)
    strict = tl.zeros([], tl.float32)
    for row in range(own_row - place, own_row):
        of_row = clipped_ptr + C.CLIPPED * row
        of_draft = tl.load(of_row + C.OF_ROW.OF_DRAFT)
        reach = tl.minimum(reach + of_draft, 0.0)
        strict = tl.minimum(strict + of_draft - tl.load(of_row + C.OF_ROW.RATIO), 0.0)
    clipped_ptr += C.CLIPPED * own_row
    divisor = divisor_of(sampling, slot, DIVIDES)
    own_lse, own = load_clipped(clipped_ptr, drawn_at, divisor, DIVIDES)
    target_ptr = logits_ptr + own_row.to(tl.int64) * logits_stride
    draft_ptr = sampling.draft_logits + slot * draft_stride
    draft_ptr += place.to(tl.int64) * draft_step_stride
    token = block * BLOCK + tl.arange(0, BLOCK)
    log_p, ratio = log_probabilities(target_ptr, draft_ptr, own_lse, token, token < vocab)
    mass = tl.sum(_residuals(log_p, ratio, own, reach * C.LOG2_E), axis=0)
    if block == 0:
        tl.store(clipped_ptr + C.OF_ROW.BEFORE, reach)
        tl.store(clipped_ptr + C.OF_ROW.STRICT_BEFORE, strict)
        if tl.load(clipped_ptr + C.OF_ROW.PRICE) > 0:
            record_ptr = records_ptr + slot * C.RECORD_SIZE
            for first in range(0, num_kept(protected, guard, own_row), C.KEPT_CHUNK):
                kept = kept_tokens(first, record_ptr, protected, guard, own_row, vocab)
                of_kept = log_probabilities(target_ptr, draft_ptr, own_lse, kept, kept >= 0)
                as_p = _residuals(*of_kept, (0.0, 0.0, 0.0), reach * C.LOG2_E)
                as_m = _residuals(*of_kept, own, reach * C.LOG2_E)
                mass += tl.sum(as_p - as_m, axis=0)
    tl.store(masses_ptr + own_row * tl.num_programs(1) + block, mass)


@triton.jit
def by_blocks(clipped_ptr, masses_ptr, num_blocks, row, offset, length, u, BLOCKS: tl.constexpr):
    """How many tokens of a draft stay; what the rule adds to the chance that each does."""
    is_there = offset < length
    of_row = clipped_ptr + C.CLIPPED * row
    of_q = tl.load(of_row + C.OF_ROW.OF_DRAFT, mask=is_there, other=-C.INF)
    of_p = tl.load(of_row + C.OF_ROW.RATIO, mask=is_there, other=0.0)
    is_behind = is_there & (offset > 0)
    before = tl.load(of_row + C.OF_ROW.BEFORE, mask=is_behind, other=0.0)
    reach = tl.exp(tl.minimum(before + of_q, 0.0))
    before = tl.load(of_row + C.OF_ROW.STRICT_BEFORE, mask=is_behind, other=0.0)
    strict = tl.exp(tl.minimum(before + of_q - of_p, 0.0))
    goes_on = offset + 1 < length
    blocks = tl.arange(0, BLOCKS)[None, :]
    parts = tl.load(
        masses_ptr + (row[:, None] + 1) * num_blocks + blocks,
        mask=goes_on[:, None] & (blocks < num_blocks),
        other=0.0,
    )
    residual = tl.maximum(tl.sum(parts, axis=1), 0.0)
    whole = residual + (1.0 - reach)
    stays = tl.where(whole > 0.0, residual / tl.where(whole > 0.0, whole, 1.0), 1.0)
    stays = tl.where(goes_on, stays, reach)
    accepted = tl.max(tl.where(is_there & (u <= stays), offset + 1, 0), axis=0)
    return accepted, tl.where(is_there, reach - strict, 0.0)


@functools.cache
def mass_settings(vocab: int) -> tuple[int, int]:
    """Settings of `mass_kernel`: (blocks of a row, block size)."""
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    return triton.cdiv(vocab, block), block


@functools.cache
def _kept_masses(num_rows: int, num_blocks: int, device: torch.device) -> torch.Tensor:
    return torch.empty((num_rows, num_blocks), device=device)


def sum_residuals(reduced: Reduced, draws: Draws, clipped: torch.Tensor) -> torch.Tensor:
    """Launches `mass_kernel`, where a draft can have a second token.

    Args:
        reduced: the step.
        draws: of the step, with `draft_logits`.
        clipped: of its rows, see `clip_rows`; BEFORE and STRICT_BEFORE are written.

    Returns:
        `[num_rows, blocks]` float32, whose sum over a row is S_i, and maybe rows behind these; not
        written of a request's first row. They are written over in the next step.
    """
    assert draws.sampling.draft_logits is not None, "drafts are drawn"
    most_drafts, vocab = draws.sampling.draft_logits.shape[1:]
    step, num_rows = reduced.step, draws.pos.shape[0]
    num_blocks, block = mass_settings(vocab)
    masses = _kept_masses(kept_size(num_rows, 256), num_blocks, step.logits.device)
    if most_drafts > 1:
        reduced.variant.launch(
            mass_kernel,
            (num_rows, num_blocks, 1),
            masses,
            clipped,
            step.logits,
            step.logits.stride(0),
            step.records.table,
            step.input_ids,
            reduced.terms.protected,
            reduced.guard,
            draws.sampling,
            draws.row_slots,
            draws.row_places,
            *draft_strides(draws),
            num_rows,
            vocab,
            block,
            draws.divides,
            num_warps=max(1, block // 1024),
            enable_fp_fusion=False,
        )
    return masses
