"""The draw behind a request's accepted drafts; `accept` launches it.

    resample_kernel   grid (B, blocks)   the largest of a block of the one row that is drawn from,
                                         with vLLM's Gumbel noise; the block that ends last puts the
                                         largest of all behind the request's drafts

The row is that of the first rejected draft token, or the bonus row. With x rejected, q its draft
distribution and p_i what the draft has reached before it (`rule`), what is drawn from is
max(p_i m - q, 0); of a fixed draft that is m without x, in which kept tokens weigh Z times what
they do in p. A draft token that was never drawn has no q.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from vllm_mars.kernels.rows import RECORD_SIZE
from vllm_mars.kernels.rule_kernel import BEFORE, CLIPPED, is_kept, log_ratio_of_clipped

# The alignment of these would multiply the compiled variants and gain nothing.
_UNALIGNED = [
    *("clipped_ptr", "input_ids_ptr", "slots_ptr", "cu_num_logits_ptr", "pos_ptr"),
    *("output_token_ids_ptr", "table_ptr"),
]
_UNSPECIALIZED = ["num_blocks", "num_speculative_tokens"]


@triton.jit
def _log_probabilities(
    logits, protected, record_ptr, vocab, clipped_ptr, draft_ptr, token, mask, temperature
):
    """log m, log m - log p and log q of tokens; q was drawn from at the temperature."""
    log_p = logits - tl.load(clipped_ptr + 3)
    draft = tl.load(draft_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    log_q = draft / temperature - tl.load(clipped_ptr + 4)
    log_w = tl.load(clipped_ptr)
    price = tl.load(clipped_ptr + 1)
    log_total = tl.load(clipped_ptr + 2)
    ratio = log_ratio_of_clipped(log_q - log_p, log_w, log_w + price, log_total)
    # Without a price m is p.
    if price > 0:
        ratio = tl.where(is_kept(token, protected, record_ptr, vocab), 0.0, ratio)
    return log_p + ratio, ratio, log_q


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
):
    request = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    temperature = tl.load(sampling.temperature + slot)
    if temperature == 0.0:
        return
    end = tl.load(cu_num_logits_ptr + request)
    start = tl.load(cu_num_logits_ptr + request - 1, mask=request > 0, other=0)
    place = tl.load(num_sampled_ptr + request).to(tl.int64) - 1
    row = start + place
    # The draft token that was rejected, below -1 if it was struck out; -1 in the bonus row.
    rejected = tl.load(input_ids_ptr + row + 1, mask=row < end - 1, other=-1)
    rejected = tl.where(rejected < vocab, rejected, -1)
    record_ptr = records_ptr + slot * RECORD_SIZE
    # What stands at a place of the request's tokens.
    output_token_ids_ptr += request.to(tl.int64) * (num_speculative_tokens + 1) + place
    table_ptr += request.to(tl.int64) * 2 * (num_speculative_tokens + 1) + place

    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    logits_ptr += row * logits_stride
    logits = tl.load(logits_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    if sampling.draft_logits is not None:
        clipped_ptr += CLIPPED * row
        draft_ptr = sampling.draft_logits + slot * draft_stride + place * draft_step_stride
        drawn_at = tl.load(sampling.drawn_at + slot)
        if rejected != -1:
            own = clipped_ptr, draft_ptr, token, mask, drawn_at
            log_m, _, log_q = _log_probabilities(logits, protected, record_ptr, vocab, *own)
            log_m += tl.load(clipped_ptr + BEFORE, mask=place > 0, other=0.0)
            of_draft = tl.exp(log_q - log_m)
            residual = log_m + libdevice.log1p(-of_draft)
            logits = tl.where(of_draft < 1.0, residual, float("-inf")).to(tl.float32)
    else:
        logits = tl.where(token != rejected, logits, float("-inf"))
        # Of each token here that is not kept.
        ratio = tl.load(table_ptr)
        if ratio < 0.0:
            logits -= tl.where(is_kept(token, protected, record_ptr, vocab), ratio, 0.0)
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
    first = request.to(tl.int64) * num_blocks
    tl.store(token_ptr + first + block, block * BLOCK + index)
    tl.store(value_ptr + first + block, value)
    # Both are stored before another block sees that this one has ended. To acquire empties the L1
    # cache of a multiprocessor, so only the last block does: a third of the time on an H200.
    tl.debug_barrier()
    if tl.atomic_add(ended_ptr + request, 1, sem="release") == num_blocks - 1:
        tl.atomic_xchg(ended_ptr + request, 0, sem="acquire")
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
        drawn = tl.load(token_ptr + best, cache_modifier=".cg").to(tl.int64)
        # Only rounding leaves nothing to draw from: then what `accept_kernel` put there stays.
        is_nothing = (tl.max(values, axis=0) == float("-inf")) & (rejected != -1)
        drawn = tl.where(is_nothing, tl.load(output_token_ids_ptr), drawn)
        tl.store(output_token_ids_ptr, drawn)
        if sampling.draft_logits is not None:
            if rejected != -1:
                logit = tl.load(logits_ptr + drawn).to(tl.float32)
                own = clipped_ptr, draft_ptr, drawn, drawn >= 0, drawn_at
                _, ratio, _ = _log_probabilities(logit, protected, record_ptr, vocab, *own)
                tl.store(table_ptr, ratio)
        elif is_kept(drawn, protected, record_ptr, vocab):
            tl.store(table_ptr, 0.0)
