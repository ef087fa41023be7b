"""What the text before each draft position asks of it: one launch for all that looks at tokens.

`naive` defines the markers' states and the walk, and what would repeat. One program serves one
request. It takes in the tokens that were committed since its last step, and
walks through the drafts: at each it looks in the answer's last `NGRAM_WINDOW` tokens for the tokens
before the position, and lists what followed there (`Constraints`). A bit for each token of the
vocabulary tells which are listed already.

These it keeps in a ring on the device, since Model Runner V2 keeps them in the host's memory: from
there a step reads its new tokens alone, all at once, and walks through them in the ring.
"""

import functools

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.constants import C
from vllm_mars.kernels.interface import (
    MAX_FOLLOWERS,
    NGRAM_WINDOW,
    Constraints,
    Markers,
    VerifyInputs,
)
from vllm_mars.kernels.launch import launch_cache_for
from vllm_mars.kernels.row_stats.fused import bucket_size


def new_ring(num_slots: int, device: torch.device) -> torch.Tensor:
    """int32 `[S, NGRAM_WINDOW]`, output token i at i modulo its width."""
    return torch.zeros((num_slots, NGRAM_WINDOW), dtype=torch.int32, device=device)


@triton.jit
def _advance(state, token, markers_ptr, num_markers, opening):
    span = state % C.THINKING
    thinking = state & C.THINKING
    left = tl.maximum(state // C.OPENING - 1, 0)
    is_listed = (token >= 0) & (token < num_markers)
    marks = tl.load(markers_ptr + token, mask=is_listed, other=0)
    is_closed = (span > 0) & (((marks >> (C.CLOSES + tl.maximum(span - 1, 0))) & 1) != 0)
    opened = (marks & C.OPENS).to(tl.int32)
    span = tl.where(span == 0, opened, tl.where(is_closed, 0, span))
    thinking = tl.where((marks & C.THINKING_START) != 0, C.THINKING, thinking)
    ends = (marks & C.THINKING_END) != 0
    thinking = tl.where(ends, 0, thinking)
    left = tl.where(ends, opening, left)
    return span + thinking + C.OPENING * left


@triton.jit
def _token_at(index, wanted, ring_ptr, num_answer, draft_ptr, WINDOW: tl.constexpr):
    """Token of the answer or, behind its end, of the draft."""
    in_answer = index < num_answer
    ring_index = tl.maximum(index, 0) % WINDOW
    of_answer = tl.load(ring_ptr + ring_index, mask=wanted & in_answer, other=0)
    of_draft = tl.load(draft_ptr + index - num_answer, mask=wanted & (index >= num_answer), other=0)
    return tl.where(in_answer, of_answer, of_draft.to(tl.int32))


# `text` below is a position, the first place that the guard looks at, and where the tokens are, as
# `_token_at` takes them.
@triton.jit
def _alike(answer_index, text, LENGTH: tl.constexpr, WINDOW: tl.constexpr):
    """How many tokens before each place, up to LENGTH - 1, are those before the position."""
    position, first, ring_ptr, num_answer, draft_ptr = text
    found = tl.zeros_like(answer_index)
    is_alike = answer_index < position
    for k in tl.static_range(1, LENGTH):
        wanted = _token_at(position - k, position >= k, ring_ptr, num_answer, draft_ptr, WINDOW)
        is_alike = is_alike & (position >= k) & (answer_index - k >= first) & (wanted >= 0)
        other = _token_at(answer_index - k, is_alike, ring_ptr, num_answer, draft_ptr, WINDOW)
        is_alike = is_alike & (wanted == other)
        found += is_alike.to(tl.int32)
    return found


@triton.jit
def _longest(token, text, BLOCK: tl.constexpr, LENGTH: tl.constexpr, WINDOW: tl.constexpr):
    """How many tokens before a token make an n-gram with it that the answer holds; 0 for none."""
    position, first, ring_ptr, num_answer, draft_ptr = text
    longest = tl.zeros([], tl.int32)
    for block in range(first + 1, position, BLOCK):
        answer_index = block + tl.arange(0, BLOCK)
        alike = _alike(answer_index, text, LENGTH, WINDOW)
        next_token = _token_at(answer_index, alike > 0, ring_ptr, num_answer, draft_ptr, WINDOW)
        longest = tl.maximum(longest, tl.max(tl.where(next_token == token, alike, 0), axis=0))
    return longest


@triton.jit
def _list(
    list_ptr,
    seen_ptr,
    vocab,
    least,
    text,
    BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Lists what followed at least so many of the tokens before a position; returns its number.

    Of lanes with the same token any may come first, but sums go by the list's order, so it is
    sorted.
    """
    position, first, ring_ptr, num_answer, draft_ptr = text
    count = tl.zeros([], tl.int32)
    for block in range(first + 1, position, BLOCK):
        answer_index = block + tl.arange(0, BLOCK)
        is_listed = _alike(answer_index, text, LENGTH, WINDOW) >= least
        if tl.max(is_listed.to(tl.int32), axis=0) > 0:
            token = _token_at(answer_index, is_listed, ring_ptr, num_answer, draft_ptr, WINDOW)
            is_listed = is_listed & (token >= 0) & (token < vocab)
            bit = tl.full([BLOCK], 1, tl.int32) << (token % 32)
            before = tl.atomic_or(seen_ptr + token // 32, bit, mask=is_listed, sem="relaxed")
            is_new = is_listed & ((before & bit) == 0)
            at = count + tl.cumsum(is_new.to(tl.int32), axis=0) - 1
            tl.store(list_ptr + at, token, mask=is_new & (at < C.MAX_FOLLOWERS))
            count += tl.sum(is_new.to(tl.int32), axis=0)
    if count > 0:
        # What was stored is read by other threads.
        tl.debug_barrier()
        index = tl.arange(0, C.MAX_FOLLOWERS)
        token = tl.load(list_ptr + index, mask=index < count, other=0)
        rank = tl.zeros_like(token)
        for k in range(0, tl.minimum(count, C.MAX_FOLLOWERS)):
            rank += (tl.load(list_ptr + k) < token).to(tl.int32)
        # All warps have loaded what others store.
        tl.debug_barrier()
        tl.store(list_ptr + rank, token, mask=index < count)
        tl.store(seen_ptr + token // 32, tl.zeros_like(token), mask=index < count)
        if count > C.MAX_FOLLOWERS:
            for block in range(0, vocab, 32 * BLOCK):
                word = block // 32 + tl.arange(0, BLOCK)
                tl.store(seen_ptr + word, tl.zeros_like(word), mask=word * 32 < vocab)
        tl.debug_barrier()
    return count


@triton.jit(
    do_not_specialize=["tokens_stride", "num_markers", "opening", "num_words", "vocab"],
    do_not_specialize_on_alignment=[
        *("ring_ptr", "slots_ptr", "tokens_ptr", "total_len_ptr", "prompt_len_ptr", "seen_ptr"),
        *("temperature_ptr", "input_ids_ptr", "cu_num_logits_ptr", "markers_ptr"),
    ],
)
def constraints_kernel(
    # `Constraints`
    constraints,
    # [batch, num_words], a bit for each token of the vocabulary, 0 before and after
    seen_ptr,
    num_words,
    vocab,
    # [S, RECORD_SIZE]
    records_ptr,
    # [S, WINDOW]
    ring_ptr,
    # [batch]
    slots_ptr,
    # [S, max_model_len], all of a slot's tokens
    tokens_ptr,
    tokens_stride,
    # By slot
    total_len_ptr,
    prompt_len_ptr,
    temperature_ptr,
    # [num_rows]: a row's draft token stands one entry behind it, and a request's last row has none
    input_ids_ptr,
    # [batch], inclusive prefix sum of the rows
    cu_num_logits_ptr,
    # [num_markers] of `Markers`, or None
    markers_ptr,
    num_markers,
    opening,
    # Whether drafts are the last token again where the drafter has none.
    PADS_WITH_LAST_TOKEN: tl.constexpr,
    # Tokens of the longest n-gram; 0 for no guard.
    LENGTH: tl.constexpr,
    WINDOW: tl.constexpr,
):
    # No more than the ring holds.
    BLOCK: tl.constexpr = C.ANSWER_BLOCK if C.ANSWER_BLOCK < WINDOW else WINDOW
    req_idx = tl.program_id(0)
    slot = tl.load(slots_ptr + req_idx).to(tl.int64)
    end = tl.load(cu_num_logits_ptr + req_idx)
    start = tl.load(cu_num_logits_ptr + req_idx - 1, mask=req_idx > 0, other=0)
    draft_ptr = input_ids_ptr + start + 1
    num_draft = end - start - 1
    ring_ptr += slot * WINDOW
    total = tl.load(total_len_ptr + slot)
    prompt_len = tl.load(prompt_len_ptr + slot)
    num_answer = total - prompt_len
    # Token i of prompt and output.
    base_ptr = tokens_ptr + slot * tokens_stride
    record_ptr = records_ptr + slot * C.RECORD_SIZE
    state = tl.load(record_ptr + C.COLUMN.STATE).to(tl.int32)
    num_scanned = tl.load(record_ptr + C.COLUMN.NUM_SCANNED).to(tl.int32)
    ring_end = tl.load(record_ptr + C.COLUMN.RING_END).to(tl.int32)
    # Where tokens were taken back, all of the answer are taken in again.
    state = tl.where(
        num_scanned > total, tl.load(record_ptr + C.COLUMN.PROMPT_STATE).to(tl.int32), state
    )
    num_scanned = tl.where(num_scanned > total, prompt_len, num_scanned)
    ring_end = tl.where(ring_end > total, prompt_len, ring_end)
    # All warps have loaded what one of them stores below.
    tl.debug_barrier()

    # The guard looks at what came before a resumed request, too.
    first_new = num_scanned
    if LENGTH > 0:
        first_new = tl.minimum(num_scanned, tl.maximum(ring_end, total - WINDOW))
    for block in range(first_new, total, BLOCK):
        index = block + tl.arange(0, BLOCK)
        tokens = tl.load(base_ptr + index, mask=index < total, other=0)
        tl.store(ring_ptr + (index - prompt_len) % WINDOW, tokens, mask=index < total)
        # What was stored is read by other threads, here and below.
        tl.debug_barrier()
        if markers_ptr is not None:
            for i in range(tl.maximum(block, num_scanned), tl.minimum(block + BLOCK, total)):
                token = tl.load(ring_ptr + (i - prompt_len) % WINDOW)
                state = _advance(state, token, markers_ptr, num_markers, opening)
    tl.store(record_ptr + C.COLUMN.STATE, state.to(tl.int64))
    tl.store(record_ptr + C.COLUMN.NUM_SCANNED, total.to(tl.int64))
    tl.store(record_ptr + C.COLUMN.RING_END, total.to(tl.int64))

    scope = tl.load(record_ptr + C.COLUMN.SCOPE)
    seen_ptr += req_idx * num_words
    # Read once: it lies in the host's memory.
    is_greedy = tl.load(temperature_ptr + slot) == 0.0
    # What would repeat means nothing to a strict request.
    is_strict = tl.load(record_ptr + C.COLUMN.VALUE) == 0
    first = tl.maximum(num_answer - WINDOW, 0)
    for j in range(0, num_draft):
        token = tl.load(draft_ptr + j).to(tl.int32)
        blocked = tl.zeros([], tl.int32)
        longest = tl.zeros([], tl.int32)
        count = tl.zeros([], tl.int32)
        if PADS_WITH_LAST_TOKEN:
            blocked = tl.where(token == tl.load(draft_ptr + j - 1), C.VERDICT.REPEAT, blocked)
        if LENGTH > 0:
            text = num_answer + j, first, ring_ptr, num_answer, draft_ptr
            if is_strict == 0:
                longest = _longest(token, text, BLOCK, LENGTH, WINDOW)
            # Of a greedy request nothing is listed where the draft token does not repeat.
            least = tl.where(is_greedy | is_strict, longest, 1)
            if least > 0:
                list_ptr = constraints.followers + (start + j).to(tl.int64) * C.MAX_FOLLOWERS
                count = _list(list_ptr, seen_ptr, vocab, least, text, BLOCK, LENGTH, WINDOW)
            blocked = tl.where(count > C.MAX_FOLLOWERS, C.VERDICT.REPEAT, blocked)
            count = tl.where(count > C.MAX_FOLLOWERS, 0, count)
        if markers_ptr is not None:
            outside = tl.where((state & C.THINKING) != 0, C.IN_ANSWER, C.IN_THINKING)
            reason = tl.where(scope == outside, C.VERDICT.SCOPE, 0)
            reason = tl.where(state >= C.OPENING, C.VERDICT.OPENING, reason)
            reason = tl.where(state % C.THINKING != 0, C.VERDICT.SPAN, reason)
            blocked = tl.where(reason != 0, reason, blocked)
            state = _advance(state, token, markers_ptr, num_markers, opening)
        tl.store(constraints.blocked + start + j, blocked.to(tl.int8))
        tl.store(constraints.repeats + start + j, (longest > 0).to(tl.int8))
        tl.store(constraints.num_followers + start + j, count)
    # The bonus row asks nothing.
    tl.store(constraints.blocked + end - 1, tl.zeros([], tl.int8))
    tl.store(constraints.repeats + end - 1, tl.zeros([], tl.int8))
    tl.store(constraints.num_followers + end - 1, tl.zeros([], tl.int32))


def compute_constraints(
    ring: torch.Tensor,
    tokens: torch.Tensor,
    step: VerifyInputs,
    temperature: torch.Tensor,
    markers: Markers | None,
    ngram: int,
    pads_with_last_token: bool = False,
) -> Constraints:
    """Launches `constraints_kernel`; the state in the records moves on.

    Args:
        ring: see `new_ring`; of any power of 2 as its width.
        tokens: int32 `[S, max_model_len]`, prompt and output of each slot.
        step: of its logits the width is read.
        temperature: float32 `[S]`; 0 is greedy.
        markers: of the engine, or None without any.
        ngram: tokens of the longest n-gram that the guard looks for, >= 2; 0 for no guard.
        pads_with_last_token: whether drafts are the last token again where the drafter has none.

    Returns:
        What the text before each row asks. It is written over in the next step.
    """
    batch, num_rows, vocab = step.slots.shape[0], step.input_ids.shape[0], step.logits.shape[1]
    device = step.input_ids.device
    constraints = _cached_constraints(bucket_size(num_rows, 256), device)
    seen = _none_seen(bucket_size(batch, 64), -(-vocab // 32), device)
    table, opening = (None, 0) if markers is None else markers
    launch_cache = launch_cache_for(device, step.slots.dtype, step.input_ids.dtype, table is None)
    launch_cache.launch(
        constraints_kernel,
        (batch, 1, 1),
        constraints,
        seen,
        seen.shape[1],
        vocab,
        step.records.table,
        ring,
        step.slots,
        tokens,
        tokens.stride(0),
        step.total_len,
        step.prompt_len,
        temperature,
        step.input_ids,
        step.cu_num_logits,
        table,
        0 if table is None else table.shape[0],
        opening,
        pads_with_last_token,
        ngram,
        ring.shape[1],
        enable_fp_fusion=False,
    )
    return constraints


@functools.cache
def _cached_constraints(num_rows: int, device: torch.device) -> Constraints:
    small = torch.zeros((2, num_rows), dtype=torch.int8, device=device)
    ids = torch.zeros((num_rows, MAX_FOLLOWERS), dtype=torch.int32, device=device)
    return Constraints(small[0], small[1], torch.zeros_like(ids[:, 0]), ids)


@functools.cache
def _none_seen(batch: int, num_words: int, device: torch.device) -> torch.Tensor:
    """Bits that are all 0 before and after each step."""
    return torch.zeros((batch, num_words), dtype=torch.int32, device=device)
