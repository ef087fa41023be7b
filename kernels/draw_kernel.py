"""The draw behind a request's accepted drafts; `accept` launches it.

    resample_kernel   grid (B, blocks)   the largest of a block of the one row that is drawn from,
                                         with vLLM's Gumbel noise
    insert_kernel     grid (B,)          joins the blocks, and puts the token behind the drafts

The row is that of the first rejected draft token, or the bonus row. With x rejected and q its draft
distribution, what is drawn from is max(m - q, 0); of a fixed draft that is p without x.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from vllm_mars.kernels.accept_kernel import log_ratio_of_clipped

# The alignment of these would multiply the compiled variants and gain nothing: the loads of a block
# with its noise are not widened anyway.
_UNALIGNED = [
    *("token_ptr", "value_ptr", "clipped_ptr", "draft_token_ids_ptr", "slots_ptr", "logits_ptr"),
    *("cu_num_draft_tokens_ptr", "num_sampled_ptr", "temperature_ptr", "seeds_ptr", "pos_ptr"),
    *("drawn_at_ptr", "output_token_ids_ptr", "table_ptr"),
]
_UNSPECIALIZED = ["vocab", "num_blocks", "width", "longest", "logits_stride"]


@triton.jit
def _drawn_row(request, cu_num_draft_tokens_ptr, num_sampled_ptr, draft_token_ids_ptr, slots_ptr):
    """The row that a request draws from, its place, its draft token or -1, and the slot."""
    end = tl.load(cu_num_draft_tokens_ptr + request)
    start = tl.load(cu_num_draft_tokens_ptr + request - 1, mask=request > 0, other=0)
    place = tl.load(num_sampled_ptr + request) - 1
    row = (start + place).to(tl.int64)
    # A row's draft token is the next one's input.
    rejected = tl.load(draft_token_ids_ptr + row + 1, mask=row < end - 1, other=-1)
    return row, place.to(tl.int64), rejected, tl.load(slots_ptr + request).to(tl.int64)


@triton.jit
def _log_probabilities(logits, clipped_ptr, row, draft_ptr, token, mask, slot, drawn_at_ptr):
    """log m, log m - log p and log q of tokens."""
    clipped_ptr += 8 * row
    log_p = logits - tl.load(clipped_ptr + 3)
    draft = tl.load(draft_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    log_q = draft / tl.load(drawn_at_ptr + slot) - tl.load(clipped_ptr + 4)
    ratio = log_ratio_of_clipped(
        log_p, log_q, tl.load(clipped_ptr), tl.load(clipped_ptr + 1), tl.load(clipped_ptr + 2)
    )
    return log_p + ratio, ratio, log_q


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def resample_kernel(
    # [batch, num_blocks] each
    token_ptr,
    value_ptr,
    # [*, vocab]
    logits_ptr,
    logits_stride,
    # Of drawn drafts: [num_rows, 8], [S, steps, vocab], and by slot
    clipped_ptr,
    draft_logits_ptr,
    draft_stride,
    draft_step_stride,
    drawn_at_ptr,
    # As in `accept_kernel`
    num_sampled_ptr,
    draft_token_ids_ptr,
    cu_num_draft_tokens_ptr,
    slots_ptr,
    temperature_ptr,
    seeds_ptr,
    pos_ptr,
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    request = tl.program_id(0)
    block = tl.program_id(1)
    row, place, rejected, slot = _drawn_row(
        request, cu_num_draft_tokens_ptr, num_sampled_ptr, draft_token_ids_ptr, slots_ptr
    )
    temperature = tl.load(temperature_ptr + slot)
    if temperature == 0.0:
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    logits_ptr += row * logits_stride
    logits = tl.load(logits_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
    if draft_logits_ptr is not None:
        if rejected >= 0:
            draft_ptr = draft_logits_ptr + slot * draft_stride + place * draft_step_stride
            log_m, _, log_q = _log_probabilities(
                logits, clipped_ptr, row, draft_ptr, token, mask, slot, drawn_at_ptr
            )
            share = tl.exp(log_q - log_m)
            rest = log_m + libdevice.log1p(-share)
            logits = tl.where(share < 1.0, rest, float("-inf")).to(tl.float32)
    else:
        logits = tl.where(token != rejected, logits, float("-inf"))
    value, index = gumbel_noised_argmax(
        logits,
        token,
        mask,
        tl.load(seeds_ptr + slot),
        tl.load(pos_ptr + row),
        temperature,
        IS_DRAFTING=False,
        USE_FP64=USE_FP64,
        APPLY_TEMPERATURE=False,
    )
    out = request.to(tl.int64) * num_blocks + block
    tl.store(token_ptr + out, block * BLOCK + index)
    tl.store(value_ptr + out, value)


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def insert_kernel(
    # [batch, width]
    output_token_ids_ptr,
    # [batch, 2, longest + 1]
    table_ptr,
    # [batch, num_blocks] each
    token_ptr,
    value_ptr,
    # As in `resample_kernel`; the logits of drawn drafts only
    logits_ptr,
    logits_stride,
    clipped_ptr,
    draft_logits_ptr,
    draft_stride,
    draft_step_stride,
    drawn_at_ptr,
    num_sampled_ptr,
    draft_token_ids_ptr,
    cu_num_draft_tokens_ptr,
    slots_ptr,
    temperature_ptr,
    width,
    longest,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    request = tl.program_id(0)
    row, place, rejected, slot = _drawn_row(
        request, cu_num_draft_tokens_ptr, num_sampled_ptr, draft_token_ids_ptr, slots_ptr
    )
    if tl.load(temperature_ptr + slot) == 0.0:
        return
    blocks = tl.arange(0, BLOCKS)
    first = request.to(tl.int64) * num_blocks
    values = tl.load(value_ptr + first + blocks, mask=blocks < num_blocks, other=float("-inf"))
    # A NaN would lead behind the blocks.
    values = tl.where(values == values, values, float("-inf"))
    token = tl.load(token_ptr + first + tl.argmax(values, axis=0)).to(tl.int64)
    tl.store(output_token_ids_ptr + request.to(tl.int64) * width + place, token)
    if draft_logits_ptr is not None:
        if rejected >= 0:
            logit = tl.load(logits_ptr + row * logits_stride + token).to(tl.float32)
            draft_ptr = draft_logits_ptr + slot * draft_stride + place * draft_step_stride
            _, ratio, _ = _log_probabilities(
                logit, clipped_ptr, row, draft_ptr, token, token >= 0, slot, drawn_at_ptr
            )
            tl.store(table_ptr + request.to(tl.int64) * 2 * (longest + 1) + place, ratio)
