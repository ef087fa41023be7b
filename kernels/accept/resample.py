"""Resampling of the token after a request's accepted drafts, in Triton.

    resample_kernel   grid (B, blocks)   argmax of a block of the resampled row with vLLM's Gumbel
                                         noise; the last block to end stores the argmax of all

The row belongs to the first rejected draft token, or is the bonus row. With x rejected, q its draft
distribution and p_i the joint ratio before it (`block_verify`), the token is sampled from
max(p_i m - q, 0). For a fixed draft this is m without x, where preserved tokens weigh Z times their
weight in p. A placeholder has no q: the token is sampled from p.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from vllm_mars.kernels.constants import C
from vllm_mars.kernels.interface import SamplingInputs, StepCounters, VerifyOutput
from vllm_mars.kernels.launch import UNALIGNED, UNSPECIALIZED
from vllm_mars.kernels.preserved import is_preserved
from vllm_mars.kernels.row_stats.fused import Reduced, bucket_size, divide_logits, draft_strides
from vllm_mars.kernels.served_dist.fused import (
    load_clip_bounds,
    load_row_inputs,
    log_probabilities,
    log_ratio,
)

# Logits of a block; a token's noise does not depend on the block size. On an H200 few large blocks
# take half the time of many small ones for 16 sampled requests, and the same time for 64.
_DRAW_BLOCK = 16_384


@triton.jit
def _served(
    target_ptr,
    clipped_ptr,
    draft_ptr,
    draft_temperature,
    divisor,
    protected,
    constraints,
    row,
    record_ptr,
    vocab,
    token,
    mask,
    APPLY_TEMPERATURE: tl.constexpr,
):
    """log2 p, log2 m - log2 p and log2 q - log2 p of tokens."""
    row_inputs = load_row_inputs(clipped_ptr, target_ptr, draft_ptr, draft_temperature, divisor)
    bounds = load_clip_bounds(clipped_ptr)
    log_p, q_ratio = log_probabilities(row_inputs, token, mask, APPLY_TEMPERATURE)
    ratio = log_ratio(q_ratio, bounds)
    # At price 0 m is p.
    if tl.load(clipped_ptr + C.CLIP_STAT.PRICE) > 0:
        is_token_preserved = is_preserved(token, protected, constraints, row, record_ptr, vocab)
        ratio = tl.where(is_token_preserved, 0.0, ratio)
    return log_p, ratio, q_ratio


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def resample_kernel(
    # [batch, num_speculative_tokens + 1]
    output_token_ids_ptr,
    # [batch, 2, num_speculative_tokens + 1]: see `StepCounters`
    table_ptr,
    # [batch, num_blocks]
    token_ptr,
    # [batch, num_blocks]
    value_ptr,
    # [batch], blocks that have ended; 0 before and after
    ended_ptr,
    # [num_rows, vocab]
    logits_ptr,
    logits_stride,
    # [num_rows, NUM_CLIP_STATS], or None without probabilistic drafts
    clipped_ptr,
    # `SamplingTensors`
    sampling,
    # Strides of `sampling.draft_logits`, [num_slots, steps, vocab]
    draft_stride,
    draft_step_stride,
    # `Protected` or None
    protected,
    # `Constraints` or None
    constraints,
    # [num_slots, RECORD_SIZE]
    records_ptr,
    # [batch], accepted draft tokens plus 1
    num_sampled_ptr,
    # [num_rows]; the draft token of a row is the next entry
    input_ids_ptr,
    # [batch], inclusive prefix sum of rows
    cu_num_logits_ptr,
    # [batch]
    slots_ptr,
    # [num_rows]
    pos_ptr,
    num_speculative_tokens,
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    USE_FP64: tl.constexpr,
    APPLY_TEMPERATURE: tl.constexpr,
):
    req_idx = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + req_idx).to(tl.int64)
    temperature = tl.load(sampling.temperature + slot)
    if temperature == 0.0:
        return
    end = tl.load(cu_num_logits_ptr + req_idx)
    start = tl.load(cu_num_logits_ptr + req_idx - 1, mask=req_idx > 0, other=0)
    local_pos = tl.load(num_sampled_ptr + req_idx).to(tl.int64) - 1
    row = start + local_pos
    # The rejected draft token, GRAMMAR_REJECTED included; -1 in the bonus row.
    rejected = tl.load(input_ids_ptr + row + 1, mask=row < end - 1, other=-1)
    rejected = tl.where(rejected < vocab, rejected, -1)
    record_ptr = records_ptr + slot * C.RECORD_SIZE
    output_token_ids_ptr += req_idx.to(tl.int64) * (num_speculative_tokens + 1) + local_pos
    table_ptr += req_idx.to(tl.int64) * 2 * (num_speculative_tokens + 1) + local_pos

    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    logits_ptr += row * logits_stride
    logits = tl.load(logits_ptr + token, mask=mask, other=float("-inf"))
    logits = divide_logits(logits, temperature, APPLY_TEMPERATURE)
    if sampling.draft_logits is not None:
        clipped_ptr += C.NUM_CLIP_STATS * row
        draft_ptr = sampling.draft_logits + slot * draft_stride + local_pos * draft_step_stride
        draft_temperature = tl.load(sampling.draft_temperature + slot)
        if rejected != -1:
            log_p, ratio, q_ratio = _served(
                target_ptr=logits_ptr,
                clipped_ptr=clipped_ptr,
                draft_ptr=draft_ptr,
                draft_temperature=draft_temperature,
                divisor=temperature,
                protected=protected,
                constraints=constraints,
                row=row,
                record_ptr=record_ptr,
                vocab=vocab,
                token=token,
                mask=mask,
                APPLY_TEMPERATURE=APPLY_TEMPERATURE,
            )
            log_joint_ratio = tl.load(
                clipped_ptr + C.CLIP_STAT.LOG_JOINT_RATIO, mask=local_pos > 0, other=0.0
            )
            # log max(p_i m - q, 0) = log m + log p_i + log(1 - q / (p_i m))
            q_share = libdevice.exp2(q_ratio - ratio - log_joint_ratio * C.LOG2_E)
            residual = (log_p + ratio) / C.LOG2_E + log_joint_ratio + libdevice.log1p(-q_share)
            # Masked tokens have a tiny p: see LEAST_LOG2.
            has_mass = (q_share < 1.0) & (log_p > C.LEAST_LOG2)
            logits = tl.where(has_mass, residual, float("-inf")).to(tl.float32)
    else:
        logits = tl.where(token != rejected, logits, float("-inf"))
        # log m - log p of all tokens that are not preserved.
        ratio = tl.load(table_ptr)
        if ratio < 0.0:
            is_token_preserved = is_preserved(token, protected, constraints, row, record_ptr, vocab)
            logits -= tl.where(is_token_preserved, ratio, 0.0)
    value, index = gumbel_noised_argmax(
        logits,
        token,
        mask,
        tl.load(sampling.seeds + slot),
        tl.load(pos_ptr + row),
        temperature,
        IS_DRAFTING=False,
        USE_FP64=USE_FP64,
        APPLY_TEMPERATURE=False,
    )
    first = req_idx.to(tl.int64) * num_blocks
    tl.store(token_ptr + first + block, block * BLOCK + index)
    tl.store(value_ptr + first + block, value)
    # Both are stored before another block sees that this one has ended. Acquiring empties the L1
    # cache of a multiprocessor, so only the last block does: a third of the time on an H200.
    tl.debug_barrier()
    if tl.atomic_add(ended_ptr + req_idx, 1, sem="release") == num_blocks - 1:
        tl.atomic_xchg(ended_ptr + req_idx, 0, sem="acquire")
        tl.debug_barrier()
        blocks = tl.arange(0, BLOCKS)
        values = tl.load(
            value_ptr + first + blocks,
            mask=blocks < num_blocks,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        # argmax of a NaN would be out of range.
        values = tl.where(values == values, values, float("-inf"))
        best = first + tl.argmax(values, axis=0)
        token_id = tl.load(token_ptr + best, cache_modifier=".cg").to(tl.int64)
        # If rounding leaves no mass, the token that `accept_kernel` wrote remains.
        is_empty = (tl.max(values, axis=0) == float("-inf")) & (rejected != -1)
        token_id = tl.where(is_empty, tl.load(output_token_ids_ptr), token_id)
        tl.store(output_token_ids_ptr, token_id)
        if sampling.draft_logits is not None:
            if rejected != -1:
                _, ratio, _ = _served(
                    target_ptr=logits_ptr,
                    clipped_ptr=clipped_ptr,
                    draft_ptr=draft_ptr,
                    draft_temperature=draft_temperature,
                    divisor=temperature,
                    protected=protected,
                    constraints=constraints,
                    row=row,
                    record_ptr=record_ptr,
                    vocab=vocab,
                    token=token_id,
                    mask=token_id >= 0,
                    APPLY_TEMPERATURE=APPLY_TEMPERATURE,
                )
                tl.store(table_ptr, ratio / C.LOG2_E)
        elif is_preserved(token_id, protected, constraints, row, record_ptr, vocab):
            tl.store(table_ptr, 0.0)


def draw(
    reduced: Reduced,
    sampling_inputs: SamplingInputs,
    clipped: torch.Tensor | None,
    output: VerifyOutput,
    step_counters: StepCounters,
) -> None:
    """Launches `resample_kernel`, which writes the last token of each sampled request."""
    step = reduced.step
    sampling = sampling_inputs.sampling
    batch = step.slots.shape[0]
    vocab = step.logits.shape[1]
    is_probabilistic = sampling.draft_logits is not None
    num_blocks, block, warps = draw_settings(vocab, is_probabilistic)
    tokens, values, ended = _cached_best(
        batch=bucket_size(batch, 256),
        num_blocks=num_blocks,
        use_fp64=sampling_inputs.use_fp64,
        device=step.logits.device,
    )
    draft_stride, draft_step_stride = draft_strides(sampling_inputs)
    reduced.launch_cache.launch(
        resample_kernel,
        (batch, num_blocks, 1),
        output.output_token_ids,
        step_counters.table,
        tokens,
        values,
        ended,
        step.logits,
        step.logits.stride(0),
        clipped,
        sampling,
        draft_stride,
        draft_step_stride,
        reduced.engine_params.protected,
        reduced.constraints,
        step.records.table,
        output.num_emitted,
        step.input_ids,
        step.cu_num_logits,
        step.slots,
        sampling_inputs.pos,
        step.num_speculative_tokens,
        vocab,
        num_blocks,
        block,
        bucket_size(num_blocks, 1),
        sampling_inputs.use_fp64,
        sampling_inputs.apply_temperature,
        num_warps=warps,
        enable_fp_fusion=True,
    )


@functools.cache
def draw_settings(vocab: int, is_probabilistic: bool) -> tuple[int, int, int]:
    """Settings of `resample_kernel`: (blocks of a row, block size, warps)."""
    # Two rows take twice the registers.
    block = min(_DRAW_BLOCK >> is_probabilistic, triton.next_power_of_2(vocab))
    return triton.cdiv(vocab, block), block, max(4, block // (512 if is_probabilistic else 1024))


@functools.cache
def _cached_best(
    batch: int, num_blocks: int, use_fp64: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token and value of each block, and the number of ended blocks: 0 after each step."""
    tokens = torch.empty((batch, num_blocks), dtype=torch.int32, device=device)
    values = torch.empty_like(tokens, dtype=torch.float64 if use_fp64 else torch.float32)
    return tokens, values, torch.zeros(batch, dtype=torch.int32, device=device)
