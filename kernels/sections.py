"""Why each draft position is strict, for vLLM's Model Runner V2: one launch, nothing on the host.

`vllm_mars.runner.sections` defines the states, the markers and the walk. One program serves one
request: it takes in the tokens that were committed since the last step, then walks through the
drafts.
"""

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.terms import THINKING, Drafts, Markers, Slots, Verdict

_SPAN = tl.constexpr(int(Verdict.SPAN))
_STRUCTURED = tl.constexpr(int(Verdict.STRUCTURED))
_THINKING = tl.constexpr(THINKING)


@triton.jit
def _advance(state, token, opens_ptr, closes_ptr, table_size, think_start, think_end):
    span = state % _THINKING
    thinking = state - span
    is_listed = (token >= 0) & (token < table_size)
    opened = tl.load(opens_ptr + token, mask=is_listed, other=0)
    closed = tl.load(closes_ptr + token, mask=is_listed, other=0)
    is_closed = (span > 0) & (((closed >> tl.maximum(span - 1, 0)) & 1) != 0)
    span = tl.where(span == 0, opened, tl.where(is_closed, 0, span))
    thinking = tl.where(token == think_end, 0, thinking)
    thinking = tl.where(token == think_start, _THINKING, thinking)
    return span + thinking


@triton.jit(
    do_not_specialize=["all_token_ids_stride", "table_size", "think_start", "think_end"],
    do_not_specialize_on_alignment=[
        "blocked_ptr",
        "states_ptr",
        "scanned_ptr",
        "is_structured_ptr",
        "idx_mapping_ptr",
        "all_token_ids_ptr",
        "total_len_ptr",
        "input_token_ids_ptr",
        "cu_num_logits_ptr",
        "opens_ptr",
        "closes_ptr",
    ],
)
def block_kernel(
    # [num_logits]
    blocked_ptr,
    # [max_num_reqs], state after the first `scanned` tokens
    states_ptr,
    # [max_num_reqs]
    scanned_ptr,
    # [max_num_reqs] or None
    is_structured_ptr,
    # [batch], slot of each request
    idx_mapping_ptr,
    # [max_num_reqs, max_model_len]
    all_token_ids_ptr,
    all_token_ids_stride,
    # [max_num_reqs]
    total_len_ptr,
    # [num_logits], input token of each row
    input_token_ids_ptr,
    # [batch], inclusive prefix sum of rows
    cu_num_logits_ptr,
    # [table_size]
    opens_ptr,
    # [table_size]
    closes_ptr,
    table_size,
    think_start,
    think_end,
    ONLY_THINKING: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    end = tl.load(cu_num_logits_ptr + request)
    start = tl.load(cu_num_logits_ptr + request - 1, mask=request > 0, other=0)
    state = tl.load(states_ptr + slot)
    total_len = tl.load(total_len_ptr + slot)
    for i in range(tl.load(scanned_ptr + slot), total_len):
        token = tl.load(all_token_ids_ptr + slot * all_token_ids_stride + i)
        state = _advance(state, token, opens_ptr, closes_ptr, table_size, think_start, think_end)
    tl.store(states_ptr + slot, state)
    tl.store(scanned_ptr + slot, total_len)

    is_structured = tl.load(is_structured_ptr + slot)
    for row in range(start, end):
        is_strict = state % _THINKING != 0
        if ONLY_THINKING:
            is_strict = is_strict | (state < _THINKING)
        blocked = tl.where(is_strict, _SPAN, 0)
        blocked = tl.where(is_structured != 0, _STRUCTURED, blocked)
        tl.store(blocked_ptr + row, blocked.to(tl.int8))
        # A row's draft token is the next row's input; the last row has none.
        if row + 1 < end:
            token = tl.load(input_token_ids_ptr + row + 1)
            state = _advance(
                state, token, opens_ptr, closes_ptr, table_size, think_start, think_end
            )


def blocked_rows(
    states: torch.Tensor,
    scanned: torch.Tensor,
    is_structured: torch.Tensor,
    slots: Slots,
    drafts: Drafts,
    markers: Markers,
) -> torch.Tensor:
    """Launches `block_kernel`, which documents the tensors; `states` and `scanned` move on.

    Args:
        states, scanned, is_structured: `[max_num_reqs]` int32.
        slots: of the requests; where a prompt ends is not read.
        drafts: the step's, with the bonus row last; the logits are not read.
        markers: of the engine.

    Returns:
        int8 `[num_logits]`, a `Verdict` where a row's draft token is verified strictly, else 0.
    """
    blocked = torch.empty(drafts.draft_token_ids.shape[0], dtype=torch.int8, device=states.device)
    block_kernel[(slots.idx_mapping.shape[0],)](
        blocked,
        states,
        scanned,
        is_structured,
        slots.idx_mapping,
        slots.all_token_ids,
        slots.all_token_ids.stride(0),
        slots.total_len,
        drafts.draft_token_ids,
        drafts.cu_num_draft_tokens,
        markers.opens,
        markers.closes,
        markers.opens.shape[0],
        *markers.thinking,
        ONLY_THINKING=markers.only_thinking,
        num_warps=1,
    )
    return blocked
