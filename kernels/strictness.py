"""Why each draft position must stay strict: one launch for all that looks at tokens.

`vllm_mars.runner.strictness` defines the markers' states and the walk, and where an answer may
repeat itself. One program serves one request. It takes in the tokens that were committed since its
last step, walks through the drafts, and compares the n-grams that end with them (of a request that
samples, what stands before the last token) with those of the answer's last `GUARD_WINDOW` tokens.

These it keeps in a ring on the device, since Model Runner V2 keeps them in the host's memory: from
there a step reads its new tokens alone, all at once, and walks through them in the ring.
"""

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.rows import RECORD_SIZE
from vllm_mars.kernels.terms import (
    CLOSES,
    GUARD_WINDOW,
    OPENING,
    OPENS,
    THINKING_END,
    Column,
    Markers,
    Step,
    Verdict,
)

_SPAN = tl.constexpr(int(Verdict.SPAN))
_REPEAT = tl.constexpr(int(Verdict.REPEAT))
_OPENED = tl.constexpr(int(Verdict.OPENING))
_OPENING = tl.constexpr(OPENING)
_OPENS = tl.constexpr(OPENS)
_THINKING_END = tl.constexpr(THINKING_END)
_CLOSES = tl.constexpr(CLOSES)
_STATE = tl.constexpr(int(Column.STATE))
_BEGUN = tl.constexpr(int(Column.BEGUN))
_SCANNED = tl.constexpr(int(Column.SCANNED))
_HELD = tl.constexpr(int(Column.HELD))
# Draft tokens, and places of the answer, that are compared at a time; so many are read at a time.
_DRAFTS = tl.constexpr(8)
_BLOCK = tl.constexpr(512)


def new_ring(num_slots: int, device: torch.device) -> torch.Tensor:
    """int32 `[S, GUARD_WINDOW]`, output token i at i modulo its width."""
    return torch.zeros((num_slots, GUARD_WINDOW), dtype=torch.int32, device=device)


@triton.jit
def _advance(state, token, markers_ptr, num_markers, opening):
    span = state % _OPENING
    left = tl.maximum(state // _OPENING - 1, 0)
    is_listed = (token >= 0) & (token < num_markers)
    marks = tl.load(markers_ptr + token, mask=is_listed, other=0)
    is_closed = (span > 0) & (((marks >> (_CLOSES + tl.maximum(span - 1, 0))) & 1) != 0)
    opened = (marks & _OPENS).to(tl.int32)
    span = tl.where(span == 0, opened, tl.where(is_closed, 0, span))
    left = tl.where((marks & _THINKING_END) != 0, opening, left)
    return span + _OPENING * left


@triton.jit
def _token_at(index, wanted, ring_ptr, num_answer, draft_ptr, WINDOW: tl.constexpr):
    """Token of the answer or, behind its end, of the draft."""
    in_answer = index < num_answer
    place = tl.maximum(index, 0) % WINDOW
    of_answer = tl.load(ring_ptr + place, mask=wanted & in_answer, other=0)
    of_draft = tl.load(draft_ptr + index - num_answer, mask=wanted & (index >= num_answer), other=0)
    return tl.where(in_answer, of_answer, of_draft.to(tl.int32))


@triton.jit(
    do_not_specialize=["tokens_stride", "num_markers", "opening"],
    do_not_specialize_on_alignment=[
        *("blocked_ptr", "ring_ptr", "slots_ptr", "tokens_ptr", "total_len_ptr", "prompt_len_ptr"),
        *("temperature_ptr", "input_ids_ptr", "cu_num_logits_ptr", "markers_ptr"),
    ],
)
def strictness_kernel(
    # [num_draft]
    blocked_ptr,
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
    FILLS: tl.constexpr,
    # Tokens of an n-gram; 0 for no guard.
    LENGTH: tl.constexpr,
    WINDOW: tl.constexpr,
):
    # No more than the ring holds.
    BLOCK: tl.constexpr = _BLOCK if _BLOCK < WINDOW else WINDOW
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    end = tl.load(cu_num_logits_ptr + request)
    start = tl.load(cu_num_logits_ptr + request - 1, mask=request > 0, other=0)
    draft_ptr = input_ids_ptr + start + 1
    num_draft = end - start - 1
    ring_ptr += slot * WINDOW
    total = tl.load(total_len_ptr + slot)
    prompt_len = tl.load(prompt_len_ptr + slot)
    num_answer = total - prompt_len
    # Token i of prompt and output.
    base_ptr = tokens_ptr + slot * tokens_stride
    record_ptr = records_ptr + slot * RECORD_SIZE
    state = tl.load(record_ptr + _STATE).to(tl.int32)
    scanned = tl.load(record_ptr + _SCANNED).to(tl.int32)
    held = tl.load(record_ptr + _HELD).to(tl.int32)
    # Where tokens were taken back, all of the answer are taken in again.
    state = tl.where(scanned > total, tl.load(record_ptr + _BEGUN).to(tl.int32), state)
    scanned = tl.where(scanned > total, prompt_len, scanned)
    held = tl.where(held > total, prompt_len, held)
    # All warps have loaded what one of them stores below.
    tl.debug_barrier()

    # The guard looks at what came before a resumed request, too.
    first_new = scanned
    if LENGTH > 0:
        first_new = tl.minimum(scanned, tl.maximum(held, total - WINDOW))
    for block in range(first_new, total, BLOCK):
        index = block + tl.arange(0, BLOCK)
        tokens = tl.load(base_ptr + index, mask=index < total, other=0)
        tl.store(ring_ptr + (index - prompt_len) % WINDOW, tokens, mask=index < total)
        # What was stored is read by other threads, here and below.
        tl.debug_barrier()
        if markers_ptr is not None:
            for i in range(tl.maximum(block, scanned), tl.minimum(block + BLOCK, total)):
                token = tl.load(ring_ptr + (i - prompt_len) % WINDOW)
                state = _advance(state, token, markers_ptr, num_markers, opening)
    tl.store(record_ptr + _STATE, state.to(tl.int64))
    tl.store(record_ptr + _SCANNED, total.to(tl.int64))
    tl.store(record_ptr + _HELD, total.to(tl.int64))

    temperature = tl.load(temperature_ptr + slot)
    for first in range(0, num_draft, _DRAFTS):
        offset = first + tl.arange(0, _DRAFTS)
        is_draft = offset < num_draft
        blocked = tl.zeros([_DRAFTS], tl.int32)
        if FILLS:
            draft = tl.load(draft_ptr + offset, mask=is_draft, other=-1)
            last = tl.load(draft_ptr + offset - 1, mask=is_draft, other=-2)
            blocked = tl.where(draft == last, _REPEAT, blocked)
        if LENGTH > 0:
            # Where the n-gram begins that ends with this draft token.
            begin = num_answer + offset - (LENGTH - 1)
            has_ngram = is_draft & (begin >= 0)
            last_begin = num_answer + tl.minimum(first + _DRAFTS, num_draft) - LENGTH
            for block in range(tl.maximum(num_answer - WINDOW, 0), last_begin, BLOCK):
                earlier = block + tl.arange(0, BLOCK)
                is_held = earlier < last_begin
                same = has_ngram[:, None] & (earlier[None, :] < begin[:, None])
                for k in tl.static_range(LENGTH):
                    wanted = _token_at(
                        begin + k, has_ngram, ring_ptr, num_answer, draft_ptr, WINDOW
                    )
                    other = _token_at(earlier + k, is_held, ring_ptr, num_answer, draft_ptr, WINDOW)
                    differs = wanted[:, None] != other[None, :]
                    if k == LENGTH - 1:
                        # Of a request that samples any token may stand there.
                        differs = tl.where(temperature != 0.0, False, differs)
                    same = same & (differs == 0)
                repeats = tl.max(same.to(tl.int32), axis=1)
                blocked = tl.where(repeats != 0, _REPEAT, blocked)
        if markers_ptr is not None:
            for j in range(first, tl.minimum(first + _DRAFTS, num_draft)):
                is_opening = tl.where(state >= _OPENING, _OPENED, 0)
                reason = tl.where(state % _OPENING != 0, _SPAN, is_opening)
                blocked = tl.where((offset == j) & (reason != 0), reason, blocked)
                token = tl.load(draft_ptr + j).to(tl.int32)
                state = _advance(state, token, markers_ptr, num_markers, opening)
        tl.store(blocked_ptr + start + offset, blocked.to(tl.int8), mask=is_draft)


def blocked_positions(
    ring: torch.Tensor,
    tokens: torch.Tensor,
    step: Step,
    temperature: torch.Tensor,
    markers: Markers | None,
    ngram: int,
    fills: bool = False,
) -> torch.Tensor:
    """Launches `strictness_kernel`; the state in the records moves on.

    Args:
        ring: see `new_ring`; of any power of 2 as its width.
        tokens: int32 `[S, max_model_len]`, prompt and output of each slot.
        step: its logits are not read.
        temperature: float32 `[S]`; 0 is greedy.
        markers: of the engine, or None without any.
        ngram: tokens of an n-gram that must not be repeated; 0 for no guard.
        fills: whether drafts are the last token again where the drafter has none.

    Returns:
        int8 `[num_rows]`, a `Verdict` where a row's draft token must stay strict, else 0; a bonus
        row's entry is not written.
    """
    num_rows, device = step.input_ids.shape[0], step.input_ids.device
    blocked = torch.empty(num_rows, dtype=torch.int8, device=device)
    table, opening = (None, 0) if markers is None else markers
    strictness_kernel[(step.slots.shape[0],)](
        blocked,
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
        FILLS=fills,
        LENGTH=ngram,
        WINDOW=ring.shape[1],
    )
    return blocked
