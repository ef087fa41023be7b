"""Verification by blocks in Triton; `block_verify.naive` has the rule.

    mass_kernel   grid (rows, blocks)   what a draft has reached before a row, p_i, and a block's
                                        part of S_i; not of a request's first row
    block_accept  a device function with which `accept_kernel` decides how many tokens stay

The kernel adds to the numbers that `clip_kernel` has found of a row. It reads the rows of
target and draft once. Nothing of the logits' size is written.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from vllm_mars.kernels.constants import C
from vllm_mars.kernels.interface import SamplingInputs
from vllm_mars.kernels.preserved import num_preserved, preserved_tokens
from vllm_mars.kernels.row_stats.fused import (
    Reduced,
    bucket_size,
    draft_strides,
    temperature_divisor,
)
from vllm_mars.kernels.served_dist.fused import load_clipped, log_probabilities, log_ratio

# Logits that a program reads.
_BLOCK = 8192
_UNALIGNED = ["input_ids_ptr", "expanded_idx_mapping_ptr", "expanded_local_pos_ptr"]


@triton.jit
def _residuals(log_p, ratio, own, log_joint_ratio):
    """max(p_i m - q, 0) of tokens, by log2 p_i."""
    log_m = log_p + log_ratio(ratio, own)
    return tl.maximum(libdevice.exp2(log_joint_ratio + log_m) - libdevice.exp2(log_p + ratio), 0.0)


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
    constraints,
    sampling,
    expanded_idx_mapping_ptr,
    expanded_local_pos_ptr,
    draft_stride,
    draft_step_stride,
    num_rows,
    vocab,
    BLOCK: tl.constexpr,
    APPLY_TEMPERATURE: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    local_pos = tl.load(expanded_local_pos_ptr + row)
    next_local_pos = tl.load(expanded_local_pos_ptr + row + 1, mask=row + 1 < num_rows, other=0)
    # Not of a first row, nor of the bonus row.
    if (local_pos == 0) | (next_local_pos == 0):
        return
    slot = tl.load(expanded_idx_mapping_ptr + row).to(tl.int64)
    draft_temperature = tl.load(sampling.draft_temperature + slot)
    if draft_temperature == 0.0:
        return
    draft = tl.load(input_ids_ptr + row + 1)
    if (draft == -1) | (draft >= vocab):
        return
    log_joint_ratio = tl.zeros([], tl.float32)
    strict_log_joint_ratio = tl.zeros([], tl.float32)
    for previous_row in range(row - local_pos, row):
        previous_ptr = clipped_ptr + C.NUM_CLIP_STATS * previous_row
        of_draft = tl.load(previous_ptr + C.CLIP_STAT.LOG_ACCEPT_RATIO)
        log_joint_ratio = tl.minimum(log_joint_ratio + of_draft, 0.0)
        strict_log_joint_ratio = tl.minimum(
            strict_log_joint_ratio + of_draft - tl.load(previous_ptr + C.CLIP_STAT.LOG_RATIO), 0.0
        )
    clipped_ptr += C.NUM_CLIP_STATS * row
    divisor = temperature_divisor(sampling, slot, APPLY_TEMPERATURE)
    own_lse, own = load_clipped(clipped_ptr, draft_temperature, divisor, APPLY_TEMPERATURE)
    target_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    draft_ptr = sampling.draft_logits + slot * draft_stride
    draft_ptr += local_pos.to(tl.int64) * draft_step_stride
    token = block * BLOCK + tl.arange(0, BLOCK)
    log_p, ratio = log_probabilities(target_ptr, draft_ptr, own_lse, token, token < vocab)
    mass = tl.sum(_residuals(log_p, ratio, own, log_joint_ratio * C.LOG2_E), axis=0)
    if block == 0:
        tl.store(clipped_ptr + C.CLIP_STAT.LOG_JOINT_RATIO, log_joint_ratio)
        tl.store(clipped_ptr + C.CLIP_STAT.STRICT_LOG_JOINT_RATIO, strict_log_joint_ratio)
        if tl.load(clipped_ptr + C.CLIP_STAT.PRICE) > 0:
            record_ptr = records_ptr + slot * C.RECORD_SIZE
            for first in range(0, num_preserved(protected, constraints, row), C.PRESERVED_CHUNK):
                preserved = preserved_tokens(first, record_ptr, protected, constraints, row, vocab)
                of_preserved = log_probabilities(
                    target_ptr, draft_ptr, own_lse, preserved, preserved >= 0
                )
                as_p = _residuals(*of_preserved, (0.0, 0.0, 0.0), log_joint_ratio * C.LOG2_E)
                as_m = _residuals(*of_preserved, own, log_joint_ratio * C.LOG2_E)
                mass += tl.sum(as_p - as_m, axis=0)
    tl.store(masses_ptr + row * tl.num_programs(1) + block, mass)


@triton.jit
def block_accept(clipped_ptr, masses_ptr, num_blocks, row, offset, length, u, BLOCKS: tl.constexpr):
    """How many tokens of a draft stay; what the rule adds to the chance that each does."""
    is_there = offset < length
    of_row = clipped_ptr + C.NUM_CLIP_STATS * row
    of_q = tl.load(of_row + C.CLIP_STAT.LOG_ACCEPT_RATIO, mask=is_there, other=-C.INF)
    of_p = tl.load(of_row + C.CLIP_STAT.LOG_RATIO, mask=is_there, other=0.0)
    has_previous = is_there & (offset > 0)
    before = tl.load(of_row + C.CLIP_STAT.LOG_JOINT_RATIO, mask=has_previous, other=0.0)
    joint_ratio = tl.exp(tl.minimum(before + of_q, 0.0))
    before = tl.load(of_row + C.CLIP_STAT.STRICT_LOG_JOINT_RATIO, mask=has_previous, other=0.0)
    strict_joint_ratio = tl.exp(tl.minimum(before + of_q - of_p, 0.0))
    goes_on = offset + 1 < length
    blocks = tl.arange(0, BLOCKS)[None, :]
    parts = tl.load(
        masses_ptr + (row[:, None] + 1) * num_blocks + blocks,
        mask=goes_on[:, None] & (blocks < num_blocks),
        other=0.0,
    )
    residual = tl.maximum(tl.sum(parts, axis=1), 0.0)
    whole = residual + (1.0 - joint_ratio)
    accept_threshold = tl.where(whole > 0.0, residual / tl.where(whole > 0.0, whole, 1.0), 1.0)
    accept_threshold = tl.where(goes_on, accept_threshold, joint_ratio)
    accepted = tl.max(tl.where(is_there & (u <= accept_threshold), offset + 1, 0), axis=0)
    return accepted, tl.where(is_there, joint_ratio - strict_joint_ratio, 0.0)


@functools.cache
def mass_settings(vocab: int) -> tuple[int, int]:
    """Settings of `mass_kernel`: (blocks of a row, block size)."""
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    return triton.cdiv(vocab, block), block


@functools.cache
def _cached_masses(num_rows: int, num_blocks: int, device: torch.device) -> torch.Tensor:
    return torch.empty((num_rows, num_blocks), device=device)


def sum_residuals(
    reduced: Reduced, sampling_inputs: SamplingInputs, clipped: torch.Tensor
) -> torch.Tensor:
    """Launches `mass_kernel`, where a draft can have a second token.

    Args:
        reduced: the step.
        sampling_inputs: of the step, with `draft_logits`.
        clipped: of its rows, see `clip_rows`; LOG_JOINT_RATIO and STRICT_LOG_JOINT_RATIO are
            written.

    Returns:
        `[num_rows, blocks]` float32, whose sum over a row is S_i, and maybe rows behind these; not
        written of a request's first row. They are written over in the next step.
    """
    assert sampling_inputs.sampling.draft_logits is not None, "drafts are drawn"
    max_draft_len, vocab = sampling_inputs.sampling.draft_logits.shape[1:]
    step, num_rows = reduced.step, sampling_inputs.pos.shape[0]
    num_blocks, block = mass_settings(vocab)
    masses = _cached_masses(bucket_size(num_rows, 256), num_blocks, step.logits.device)
    if max_draft_len > 1:
        reduced.launch_cache.launch(
            mass_kernel,
            (num_rows, num_blocks, 1),
            masses,
            clipped,
            step.logits,
            step.logits.stride(0),
            step.records.table,
            step.input_ids,
            reduced.engine_params.protected,
            reduced.constraints,
            sampling_inputs.sampling,
            sampling_inputs.expanded_idx_mapping,
            sampling_inputs.expanded_local_pos,
            *draft_strides(sampling_inputs),
            num_rows,
            vocab,
            block,
            sampling_inputs.apply_temperature,
            num_warps=max(1, block // 1024),
            enable_fp_fusion=False,
        )
    return masses
