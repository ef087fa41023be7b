"""Constraints in Triton, one program per request: `naive` and `markers` are the definition.

Answer tokens are mirrored in a ring buffer on the device, because Model Runner V2 keeps them in
host memory; each step copies only its new tokens.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.constants import C
from vllm_mars.kernels.interface import (
    MAX_FOLLOWERS,
    NGRAM_WINDOW,
    ConstraintInputs,
    Constraints,
    VerifyInputs,
)
from vllm_mars.kernels.launch import UNALIGNED, UNSPECIALIZED, launch_cache_for
from vllm_mars.kernels.row_stats.fused import bucket_size


def new_ring(num_slots: int, device: torch.device) -> torch.Tensor:
    """Returns ring buffers, int32 `[S, NGRAM_WINDOW]`; output token i is at i % NGRAM_WINDOW."""
    return torch.zeros((num_slots, NGRAM_WINDOW), dtype=torch.int32, device=device)


@triton.jit
def _advance(state, token, markers_ptr, num_markers, opening):
    """Returns the marker state after one more token: see `MarkerTracker.advance`."""
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


class NgramText(NamedTuple):
    """Answer and draft for the n-gram check of one draft position, on the device."""

    # Index of the position; answer and draft tokens are numbered from 0
    position: tl.tensor
    # First index that is searched
    first: tl.tensor
    # Number of answer tokens
    num_answer: tl.tensor
    # [WINDOW], ring buffer with the last answer tokens
    ring_ptr: tl.tensor
    # [num_draft]
    draft_ptr: tl.tensor


@triton.jit
def _token_at(index, text, mask, WINDOW: tl.constexpr):
    """Loads tokens of the answer and, after its end, of the draft."""
    num_answer = text.num_answer
    in_answer = index < num_answer
    ring_index = tl.maximum(index, 0) % WINDOW
    answer_token = tl.load(text.ring_ptr + ring_index, mask=mask & in_answer, other=0)
    in_draft = index >= num_answer
    draft_token = tl.load(text.draft_ptr + index - num_answer, mask=mask & in_draft, other=0)
    return tl.where(in_answer, answer_token, draft_token.to(tl.int32))


@triton.jit
def _match_length(index, text, LENGTH: tl.constexpr, WINDOW: tl.constexpr):
    """Counts the tokens before each index that match those before the position."""
    # Backwards up to the first difference, at most LENGTH - 1.
    position = text.position
    length = tl.zeros_like(index)
    is_match = index < position
    for k in tl.static_range(1, LENGTH):
        token = _token_at(position - k, text, position >= k, WINDOW)
        is_match = is_match & (position >= k) & (index - k >= text.first) & (token >= 0)
        is_match = is_match & (token == _token_at(index - k, text, is_match, WINDOW))
        length += is_match.to(tl.int32)
    return length


@triton.jit
def _longest_match(token, text, BLOCK: tl.constexpr, LENGTH: tl.constexpr, WINDOW: tl.constexpr):
    """Length, less 1, of the longest n-gram of the answer that a token would complete; else 0."""
    longest = tl.zeros([], tl.int32)
    for block in range(text.first + 1, text.position, BLOCK):
        index = block + tl.arange(0, BLOCK)
        length = _match_length(index, text, LENGTH, WINDOW)
        next_token = _token_at(index, text, length > 0, WINDOW)
        longest = tl.maximum(longest, tl.max(tl.where(next_token == token, length, 0), axis=0))
    return longest


@triton.jit
def _list_followers(
    # [MAX_FOLLOWERS], output
    list_ptr,
    # [num_words], a bit for each token of the vocabulary that is listed; 0 before and after
    seen_ptr,
    vocab,
    min_length,
    text,
    BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Lists the tokens after matches of at least `min_length`; returns their number."""
    # The list is incomplete if there are more than MAX_FOLLOWERS.
    count = tl.zeros([], tl.int32)
    for block in range(text.first + 1, text.position, BLOCK):
        index = block + tl.arange(0, BLOCK)
        is_listed = _match_length(index, text, LENGTH, WINDOW) >= min_length
        if tl.max(is_listed.to(tl.int32), axis=0) > 0:
            token = _token_at(index, text, is_listed, WINDOW)
            is_listed = is_listed & (token >= 0) & (token < vocab)
            bit = tl.full([BLOCK], 1, tl.int32) << (token % 32)
            before = tl.atomic_or(seen_ptr + token // 32, bit, mask=is_listed, sem="relaxed")
            is_new = is_listed & ((before & bit) == 0)
            at = count + tl.cumsum(is_new.to(tl.int32), axis=0) - 1
            tl.store(list_ptr + at, token, mask=is_new & (at < C.MAX_FOLLOWERS))
            count += tl.sum(is_new.to(tl.int32), axis=0)
    if count > 0:
        # The list's order depends on which lane sets a token's bit first. It is sorted, because
        # later kernels sum over it, and rounding depends on the order.
        # Other threads read the stored tokens.
        tl.debug_barrier()
        index = tl.arange(0, C.MAX_FOLLOWERS)
        token = tl.load(list_ptr + index, mask=index < count, other=0)
        rank = tl.zeros_like(token)
        for k in range(0, tl.minimum(count, C.MAX_FOLLOWERS)):
            rank += (tl.load(list_ptr + k) < token).to(tl.int32)
        # All warps must load before others store.
        tl.debug_barrier()
        tl.store(list_ptr + rank, token, mask=index < count)
        tl.store(seen_ptr + token // 32, tl.zeros_like(token), mask=index < count)
        if count > C.MAX_FOLLOWERS:
            for block in range(0, vocab, 32 * BLOCK):
                word = block // 32 + tl.arange(0, BLOCK)
                tl.store(seen_ptr + word, tl.zeros_like(word), mask=word * 32 < vocab)
        tl.debug_barrier()
    return count


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "vocab"], do_not_specialize_on_alignment=UNALIGNED)
def constraints_kernel(
    # `Constraints`, output
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
    # [S, max_model_len] int32, prompt and output
    tokens_ptr,
    tokens_stride,
    # [S]
    total_len_ptr,
    # [S]
    prompt_len_ptr,
    # [S] float32; 0 is greedy
    temperature_ptr,
    # [num_rows]: entry i + 1 is row i's draft token, except for a request's last row
    input_ids_ptr,
    # [batch], inclusive prefix sum of the requests' rows
    cu_num_logits_ptr,
    # [num_markers], the table of `Markers`, or None
    markers_ptr,
    num_markers,
    opening,
    # Whether the drafter repeats the last token if it has no proposal
    PADS_WITH_LAST_TOKEN: tl.constexpr,
    # Longest n-gram that is checked, in tokens; 0 if none is
    LENGTH: tl.constexpr,
    WINDOW: tl.constexpr,
):
    # A block of new tokens must fit in the ring.
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
    tokens_ptr += slot * tokens_stride
    record_ptr = records_ptr + slot * C.RECORD_SIZE
    state = tl.load(record_ptr + C.COLUMN.STATE).to(tl.int32)
    num_scanned = tl.load(record_ptr + C.COLUMN.NUM_SCANNED).to(tl.int32)
    ring_end = tl.load(record_ptr + C.COLUMN.RING_END).to(tl.int32)
    # If tokens were taken back, the whole answer is scanned again.
    state = tl.where(
        num_scanned > total, tl.load(record_ptr + C.COLUMN.PROMPT_STATE).to(tl.int32), state
    )
    num_scanned = tl.where(num_scanned > total, prompt_len, num_scanned)
    ring_end = tl.where(ring_end > total, prompt_len, ring_end)
    # All warps must load before one of them stores.
    tl.debug_barrier()

    first_new = num_scanned
    # The n-gram check also needs the tokens that a resumed request has from before.
    if LENGTH > 0:
        first_new = tl.minimum(num_scanned, tl.maximum(ring_end, total - WINDOW))
    for block in range(first_new, total, BLOCK):
        index = block + tl.arange(0, BLOCK)
        tokens = tl.load(tokens_ptr + index, mask=index < total, other=0)
        tl.store(ring_ptr + (index - prompt_len) % WINDOW, tokens, mask=index < total)
        # Other threads read the stored tokens, here and below.
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
    # Loaded once, because it is in host memory.
    is_greedy = tl.load(temperature_ptr + slot) == 0.0
    # Strict requests need no n-gram check.
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
            text = NgramText(
                position=num_answer + j,
                first=first,
                num_answer=num_answer,
                ring_ptr=ring_ptr,
                draft_ptr=draft_ptr,
            )
            if is_strict == 0:
                longest = _longest_match(token, text, BLOCK, LENGTH, WINDOW)
            # In greedy requests nothing is listed if the draft token does not repeat.
            min_length = tl.where(is_greedy | is_strict, longest, 1)
            if min_length > 0:
                list_ptr = constraints.followers + (start + j).to(tl.int64) * C.MAX_FOLLOWERS
                count = _list_followers(
                    list_ptr,
                    seen_ptr,
                    vocab,
                    min_length,
                    text,
                    BLOCK=BLOCK,
                    LENGTH=LENGTH,
                    WINDOW=WINDOW,
                )
            blocked = tl.where(count > C.MAX_FOLLOWERS, C.VERDICT.REPEAT, blocked)
            count = tl.where(count > C.MAX_FOLLOWERS, 0, count)
        if markers_ptr is not None:
            other_scope = tl.where((state & C.THINKING) != 0, C.IN_ANSWER, C.IN_THINKING)
            reason = tl.where(scope == other_scope, C.VERDICT.SCOPE, 0)
            reason = tl.where(state >= C.OPENING, C.VERDICT.OPENING, reason)
            reason = tl.where(state % C.THINKING != 0, C.VERDICT.SPAN, reason)
            blocked = tl.where(reason != 0, reason, blocked)
            state = _advance(state, token, markers_ptr, num_markers, opening)
        tl.store(constraints.blocked + start + j, blocked.to(tl.int8))
        tl.store(constraints.repeats + start + j, (longest > 0).to(tl.int8))
        tl.store(constraints.num_followers + start + j, count)
    # The bonus row has no constraints.
    tl.store(constraints.blocked + end - 1, tl.zeros([], tl.int8))
    tl.store(constraints.repeats + end - 1, tl.zeros([], tl.int8))
    tl.store(constraints.num_followers + end - 1, tl.zeros([], tl.int32))


def compute_constraints(step: VerifyInputs, inputs: ConstraintInputs) -> Constraints:
    """Computes the constraints of each row, and updates marker states and ring buffers.

    The logits' values are not read. The next step overwrites the result.
    """
    batch = step.slots.shape[0]
    num_rows = step.input_ids.shape[0]
    vocab = step.logits.shape[1]
    device = step.input_ids.device
    constraints = _cached_constraints(bucket_size(num_rows, 256), device)
    seen = _none_seen(bucket_size(batch, 64), -(-vocab // 32), device)
    table, opening = (None, 0) if inputs.markers is None else inputs.markers
    launch_cache = launch_cache_for(device, step.slots.dtype, step.input_ids.dtype, table is None)
    launch_cache.launch(
        constraints_kernel,
        (batch, 1, 1),
        constraints,
        seen,
        seen.shape[1],
        vocab,
        step.records.table,
        inputs.ring,
        step.slots,
        inputs.tokens,
        inputs.tokens.stride(0),
        step.total_len,
        step.prompt_len,
        inputs.temperature,
        step.input_ids,
        step.cu_num_logits,
        table,
        0 if table is None else table.shape[0],
        opening,
        inputs.pads_with_last_token,
        inputs.ngram,
        inputs.ring.shape[1],
        enable_fp_fusion=False,
    )
    return constraints


@functools.cache
def _cached_constraints(num_rows: int, device: torch.device) -> Constraints:
    return Constraints(
        blocked=torch.zeros(num_rows, dtype=torch.int8, device=device),
        repeats=torch.zeros(num_rows, dtype=torch.int8, device=device),
        num_followers=torch.zeros(num_rows, dtype=torch.int32, device=device),
        followers=torch.zeros((num_rows, MAX_FOLLOWERS), dtype=torch.int32, device=device),
    )


@functools.cache
def _none_seen(batch: int, num_words: int, device: torch.device) -> torch.Tensor:
    """Returns cached bits, which are all 0 before and after each step."""
    return torch.zeros((batch, num_words), dtype=torch.int32, device=device)
