"""Block verification in Triton: see `block_verify.naive` for the rule.

    mass_kernel   grid (rows, blocks)   p_i of the draft before a row, and the part of S_i of a
                                        block; skips the first row of a request
    block_accept  device function with which `accept_kernel` finds the number of accepted tokens

Buffers: masses [rows, blocks] float32; two columns of the `clipped` buffer of `clip_kernel`.
Bytes moved: target and draft row once. Not materialised: anything of the logits' size.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from vllm_mars.kernels.constants import C
from vllm_mars.kernels.interface import SamplingInputs
from vllm_mars.kernels.launch import UNALIGNED, UNSPECIALIZED
from vllm_mars.kernels.preserved import num_preserved, preserved_tokens
from vllm_mars.kernels.row_stats.fused import (
    Reduced,
    bucket_size,
    draft_strides,
    temperature_divisor,
)
from vllm_mars.kernels.served_dist.fused import (
    ClipBounds,
    load_clip_bounds,
    load_row_inputs,
    log_probabilities,
    log_ratio,
)

# Logits that a program reads.
_BLOCK = 8192


@triton.jit
def _residuals(log_p, ratio, bounds, log_joint_ratio):
    """max(p_i m - q, 0) of tokens, from log2 p_i."""
    log_m = log_p + log_ratio(ratio, bounds)
    return tl.maximum(libdevice.exp2(log_joint_ratio + log_m) - libdevice.exp2(log_p + ratio), 0.0)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def mass_kernel(
    # [num_rows, blocks]
    masses_ptr,
    # [num_rows, NUM_CLIP_STATS]
    clipped_ptr,
    # [num_rows, vocab]
    logits_ptr,
    logits_stride,
    # [num_slots, RECORD_SIZE]
    records_ptr,
    # [num_rows]; the draft token of a row is the next entry
    input_ids_ptr,
    # `Protected` or None
    protected,
    # `Constraints` or None
    constraints,
    # `SamplingTensors`
    sampling,
    # [num_rows], slot of each row
    expanded_idx_mapping_ptr,
    # [num_rows], position of each row in its request
    expanded_local_pos_ptr,
    # Strides of `sampling.draft_logits`, [num_slots, steps, vocab]
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
    # Skips the first row and the bonus row of a request.
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
        log_accept_ratio = tl.load(previous_ptr + C.CLIP_STAT.LOG_ACCEPT_RATIO)
        log_m_ratio = tl.load(previous_ptr + C.CLIP_STAT.LOG_RATIO)
        # p_i = min(p_(i-1) m / q, 1), and the same with p instead of m.
        log_joint_ratio = tl.minimum(log_joint_ratio + log_accept_ratio, 0.0)
        strict_log_joint_ratio = tl.minimum(
            strict_log_joint_ratio + log_accept_ratio - log_m_ratio, 0.0
        )
    clipped_ptr += C.NUM_CLIP_STATS * row
    divisor = temperature_divisor(sampling, slot, APPLY_TEMPERATURE)
    target_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    draft_ptr = sampling.draft_logits + slot * draft_stride
    draft_ptr += local_pos.to(tl.int64) * draft_step_stride
    row_inputs = load_row_inputs(clipped_ptr, target_ptr, draft_ptr, draft_temperature, divisor)
    bounds = load_clip_bounds(clipped_ptr)
    token = block * BLOCK + tl.arange(0, BLOCK)
    log_p, ratio = log_probabilities(row_inputs, token, token < vocab, APPLY_TEMPERATURE)
    mass = tl.sum(_residuals(log_p, ratio, bounds, log_joint_ratio * C.LOG2_E), axis=0)
    if block == 0:
        tl.store(clipped_ptr + C.CLIP_STAT.LOG_JOINT_RATIO, log_joint_ratio)
        tl.store(clipped_ptr + C.CLIP_STAT.STRICT_LOG_JOINT_RATIO, strict_log_joint_ratio)
        if tl.load(clipped_ptr + C.CLIP_STAT.PRICE) > 0:
            # m = p on preserved tokens.
            unclipped = ClipBounds(lowest=0.0, highest=0.0, log_total=0.0)
            record_ptr = records_ptr + slot * C.RECORD_SIZE
            for first in range(0, num_preserved(protected, constraints, row), C.PRESERVED_CHUNK):
                preserved = preserved_tokens(first, record_ptr, protected, constraints, row, vocab)
                preserved_log_p, preserved_ratio = log_probabilities(
                    row_inputs, preserved, preserved >= 0, APPLY_TEMPERATURE
                )
                as_p = _residuals(
                    preserved_log_p, preserved_ratio, unclipped, log_joint_ratio * C.LOG2_E
                )
                as_m = _residuals(
                    preserved_log_p, preserved_ratio, bounds, log_joint_ratio * C.LOG2_E
                )
                mass += tl.sum(as_p - as_m, axis=0)
    tl.store(masses_ptr + row * tl.num_programs(1) + block, mass)


@triton.jit
def block_accept(
    # [num_rows, NUM_CLIP_STATS]
    clipped_ptr,
    # [num_rows, num_blocks]
    masses_ptr,
    num_blocks,
    row,
    offset,
    length,
    u,
    BLOCKS: tl.constexpr,
):
    """Number of accepted draft tokens, and the rule's gain in each acceptance probability."""
    is_draft = offset < length
    stats_ptr = clipped_ptr + C.NUM_CLIP_STATS * row
    log_accept_ratio = tl.load(
        stats_ptr + C.CLIP_STAT.LOG_ACCEPT_RATIO, mask=is_draft, other=-C.INF
    )
    log_m_ratio = tl.load(stats_ptr + C.CLIP_STAT.LOG_RATIO, mask=is_draft, other=0.0)
    has_previous = is_draft & (offset > 0)
    # p_i = min(p_(i-1) m / q, 1), and the same with p instead of m.
    previous = tl.load(stats_ptr + C.CLIP_STAT.LOG_JOINT_RATIO, mask=has_previous, other=0.0)
    joint_ratio = tl.exp(tl.minimum(previous + log_accept_ratio, 0.0))
    previous = tl.load(stats_ptr + C.CLIP_STAT.STRICT_LOG_JOINT_RATIO, mask=has_previous, other=0.0)
    strict_joint_ratio = tl.exp(tl.minimum(previous + log_accept_ratio - log_m_ratio, 0.0))
    has_next = offset + 1 < length
    blocks = tl.arange(0, BLOCKS)[None, :]
    parts = tl.load(
        masses_ptr + (row[:, None] + 1) * num_blocks + blocks,
        mask=has_next[:, None] & (blocks < num_blocks),
        other=0.0,
    )
    residual = tl.maximum(tl.sum(parts, axis=1), 0.0)
    # h_i = S_i / (S_i + 1 - p_i), but h_n = p_n (arXiv 2403.10444)
    total = residual + (1.0 - joint_ratio)
    accept_threshold = tl.where(total > 0.0, residual / tl.where(total > 0.0, total, 1.0), 1.0)
    accept_threshold = tl.where(has_next, accept_threshold, joint_ratio)
    accepted = tl.max(tl.where(is_draft & (u <= accept_threshold), offset + 1, 0), axis=0)
    return accepted, tl.where(is_draft, joint_ratio - strict_joint_ratio, 0.0)


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
    """Launches `mass_kernel` if drafts can have more than one token.

    Returns:
        `[>= num_rows, blocks]` float32, overwritten in the next step; S_i is the sum over a row.
        The first row of a request is not written.
    """
    sampling = sampling_inputs.sampling
    assert sampling.draft_logits is not None, "probabilistic drafts have logits"
    step = reduced.step
    num_rows = sampling_inputs.pos.shape[0]
    max_draft_len, vocab = sampling.draft_logits.shape[1:]
    draft_stride, draft_step_stride = draft_strides(sampling_inputs)
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
            sampling,
            sampling_inputs.expanded_idx_mapping,
            sampling_inputs.expanded_local_pos,
            draft_stride,
            draft_step_stride,
            num_rows,
            vocab,
            block,
            sampling_inputs.apply_temperature,
            num_warps=max(1, block // 1024),
            enable_fp_fusion=False,
        )
    return masses
