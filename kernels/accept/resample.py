"""The draw behind a request's accepted drafts, in Triton.

    resample_kernel   grid (B, blocks)   the largest of a block of the one row that is drawn from,
                                         with vLLM's Gumbel noise; the block that ends last puts the
                                         largest of all behind the request's drafts

The row is that of the first rejected draft token, or the bonus row. With x rejected, q its draft
distribution and p_i what the draft has reached before it (`block_verify`), what is drawn from is
max(p_i m - q, 0); of a fixed draft that is m without x, in which kept tokens weigh Z times what
they do in p. A draft token that was never drawn has no q.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from vllm_mars.kernels.constants import C
from vllm_mars.kernels.interface import SamplingInputs, StepCounters, VerifyOutput
from vllm_mars.kernels.preserved import is_preserved
from vllm_mars.kernels.row_stats.fused import Reduced, bucket_size, divide_logits, draft_strides
from vllm_mars.kernels.served_dist.fused import load_clipped, log_probabilities, log_ratio

# Logits of a block of the draw; the noise of a token is the same in a block of any size. On an H200
# few large blocks take half the time of many small ones where 16 requests sample, and no more where
# 64 do.
_DRAW_BLOCK = 16_384

# The alignment of these would multiply the compiled variants and gain nothing.
_UNALIGNED = [
    *("clipped_ptr", "input_ids_ptr", "slots_ptr", "cu_num_logits_ptr", "pos_ptr"),
    *("output_token_ids_ptr", "table_ptr"),
]
_UNSPECIALIZED = ["num_blocks", "num_speculative_tokens"]


@triton.jit
def _served(
    target_ptr,
    clipped_ptr,
    draft_ptr,
    draft_temperature,
    divisor,
    preserved,
    token,
    mask,
    APPLY_TEMPERATURE: tl.constexpr,
):
    """Of tokens log2 p, log2 m - log2 p and log2 q - log2 p."""
    row, own = load_clipped(clipped_ptr, draft_temperature, divisor, APPLY_TEMPERATURE)
    log_p, of_q = log_probabilities(target_ptr, draft_ptr, row, token, mask)
    ratio = log_ratio(of_q, own)
    # Without a price m is p.
    if tl.load(clipped_ptr + C.CLIP_STAT.PRICE) > 0:
        ratio = tl.where(is_preserved(token, *preserved), 0.0, ratio)
    return log_p, ratio, of_q


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def resample_kernel(
    # [batch, num_speculative_tokens + 1]; [batch, 2, num_speculative_tokens + 1]
    output_token_ids_ptr,
    table_ptr,
    # [batch, num_blocks] each
    token_ptr,
    value_ptr,
    # [batch], blocks that have ended; 0 before and after
    ended_ptr,
    # As in `accept_kernel`
    logits_ptr,
    logits_stride,
    clipped_ptr,
    sampling,
    draft_stride,
    draft_step_stride,
    protected,
    constraints,
    # [S, RECORD_SIZE]
    records_ptr,
    num_sampled_ptr,
    input_ids_ptr,
    cu_num_logits_ptr,
    slots_ptr,
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
    # The draft token that was rejected, below -1 if it was struck out; -1 in the bonus row.
    rejected = tl.load(input_ids_ptr + row + 1, mask=row < end - 1, other=-1)
    rejected = tl.where(rejected < vocab, rejected, -1)
    preserved = protected, constraints, row, records_ptr + slot * C.RECORD_SIZE, vocab
    # What stands at a place of the request's tokens.
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
        own = logits_ptr, clipped_ptr, draft_ptr, draft_temperature, temperature, preserved
        if rejected != -1:
            log_p, ratio, of_q = _served(*own, token, mask, APPLY_TEMPERATURE)
            log_joint_ratio = tl.load(
                clipped_ptr + C.CLIP_STAT.LOG_JOINT_RATIO, mask=local_pos > 0, other=0.0
            )
            of_draft = libdevice.exp2(of_q - ratio - log_joint_ratio * C.LOG2_E)
            residual = (log_p + ratio) / C.LOG2_E + log_joint_ratio + libdevice.log1p(-of_draft)
            # What the target forbids has a p, if a small one.
            is_there = (of_draft < 1.0) & (log_p > C.LEAST_LOG2)
            logits = tl.where(is_there, residual, float("-inf")).to(tl.float32)
    else:
        logits = tl.where(token != rejected, logits, float("-inf"))
        # Of each token here that is not kept.
        ratio = tl.load(table_ptr)
        if ratio < 0.0:
            logits -= tl.where(is_preserved(token, *preserved), ratio, 0.0)
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
    # Both are stored before another block sees that this one has ended. To acquire empties the L1
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
        # A NaN would lead behind the blocks.
        values = tl.where(values == values, values, float("-inf"))
        best = first + tl.argmax(values, axis=0)
        token_id = tl.load(token_ptr + best, cache_modifier=".cg").to(tl.int64)
        # Only rounding leaves nothing to draw from: then what `accept_kernel` put there stays.
        is_empty = (tl.max(values, axis=0) == float("-inf")) & (rejected != -1)
        token_id = tl.where(is_empty, tl.load(output_token_ids_ptr), token_id)
        tl.store(output_token_ids_ptr, token_id)
        if sampling.draft_logits is not None:
            if rejected != -1:
                _, ratio, _ = _served(*own, token_id, token_id >= 0, APPLY_TEMPERATURE)
                tl.store(table_ptr, ratio / C.LOG2_E)
        elif is_preserved(token_id, *preserved):
            tl.store(table_ptr, 0.0)


def draw(
    reduced: Reduced,
    sampling_inputs: SamplingInputs,
    clipped: torch.Tensor | None,
    output: VerifyOutput,
    step_counters: StepCounters,
) -> None:
    """Adds the token behind the accepted drafts of each request that samples."""
    step, batch = reduced.step, reduced.step.slots.shape[0]
    vocab, is_probabilistic = (
        step.logits.shape[1],
        sampling_inputs.sampling.draft_logits is not None,
    )
    num_blocks, block, warps = draw_settings(vocab, is_probabilistic)
    size = bucket_size(batch, 256)
    tokens, values, ended = _cached_best(
        size, num_blocks, sampling_inputs.use_fp64, step.logits.device
    )
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
        sampling_inputs.sampling,
        *draft_strides(sampling_inputs),
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
    """Token and value of each block, and how many blocks have ended: 0 again after each step."""
    tokens = torch.empty((batch, num_blocks), dtype=torch.int32, device=device)
    values = torch.empty_like(tokens, dtype=torch.float64 if use_fp64 else torch.float32)
    return tokens, values, torch.zeros(batch, dtype=torch.int32, device=device)
