"""Which draft tokens repeat their answer: one launch, nothing on the host, no state.

`vllm_mars.runner.repeats` has the definition. One program serves one request. It compares the
n-grams that end with the draft tokens with every earlier one, in blocks, and reads the answer once
for each token of an n-gram and each `DRAFTS` drafts. On Model Runner V2 it is mostly in the host's
memory.
"""

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.terms import Drafts, Slots, Verdict

_REPEAT = tl.constexpr(int(Verdict.REPEAT))
# Draft tokens and places of the answer that are compared at a time.
DRAFTS = 8
BLOCK = 512


@triton.jit
def _token_at(index, wanted, answer_ptr, num_answer, draft_ptr):
    """Token of the answer or, behind its end, of the draft."""
    in_answer = index < num_answer
    of_answer = tl.load(answer_ptr + index, mask=wanted & in_answer, other=0)
    in_draft = index >= num_answer
    of_draft = tl.load(draft_ptr + index - num_answer, mask=wanted & in_draft, other=0)
    return tl.where(in_answer, of_answer, of_draft)


@triton.jit(
    do_not_specialize=["all_token_ids_stride"],
    do_not_specialize_on_alignment=[
        "blocked_ptr",
        "idx_mapping_ptr",
        "all_token_ids_ptr",
        "prompt_len_ptr",
        "total_len_ptr",
        "draft_token_ids_ptr",
        "cu_num_draft_tokens_ptr",
    ],
)
def repeat_kernel(
    # [num_draft]
    blocked_ptr,
    # [batch], slot of each request
    idx_mapping_ptr,
    # [max_num_reqs, max_model_len], prompt and answer
    all_token_ids_ptr,
    all_token_ids_stride,
    # [max_num_reqs]
    prompt_len_ptr,
    # [max_num_reqs]
    total_len_ptr,
    # [num_draft]
    draft_token_ids_ptr,
    # [batch], inclusive prefix sum
    cu_num_draft_tokens_ptr,
    # As in `Drafts`: a row's draft token stands one entry behind it, and the last row has none.
    BONUS_ROW_IS_LAST: tl.constexpr,
    # Tokens of an n-gram.
    LENGTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    end = tl.load(cu_num_draft_tokens_ptr + request)
    start = tl.load(cu_num_draft_tokens_ptr + request - 1, mask=request > 0, other=0)
    prompt_len = tl.load(prompt_len_ptr + slot)
    num_answer = tl.load(total_len_ptr + slot) - prompt_len
    answer_ptr = all_token_ids_ptr + slot * all_token_ids_stride + prompt_len
    draft_ptr = draft_token_ids_ptr + start
    num_draft = end - start
    if BONUS_ROW_IS_LAST:
        draft_ptr += 1
        num_draft -= 1
    for first in range(0, num_draft, DRAFTS):
        offset = first + tl.arange(0, DRAFTS)
        # Where the n-gram begins that ends with this draft token.
        begin = num_answer + offset - (LENGTH - 1)
        has_ngram = (offset < num_draft) & (begin >= 0)
        repeats = tl.zeros([DRAFTS], tl.int32)
        last_begin = num_answer + tl.minimum(first + DRAFTS, num_draft) - LENGTH
        for block in range(0, last_begin, BLOCK):
            earlier = block + tl.arange(0, BLOCK)
            same = has_ngram[:, None] & (earlier[None, :] < begin[:, None])
            for i in tl.static_range(LENGTH):
                token = _token_at(begin + i, has_ngram, answer_ptr, num_answer, draft_ptr)
                held = _token_at(
                    earlier + i, earlier < last_begin, answer_ptr, num_answer, draft_ptr
                )
                same = same & (token[:, None] == held[None, :])
            repeats = tl.maximum(repeats, tl.max(same.to(tl.int32), axis=1))
        row = start + offset
        is_free = tl.load(blocked_ptr + row, mask=offset < num_draft, other=1) == 0
        is_repeat = (offset < num_draft) & is_free & (repeats != 0)
        tl.store(blocked_ptr + row, _REPEAT, mask=is_repeat)


def block_repeats(blocked: torch.Tensor, slots: Slots, drafts: Drafts, length: int) -> None:
    """Launches `repeat_kernel`, which documents the tensors.

    Args:
        blocked: int8 `[num_draft]`; REPEAT is written where a draft token repeats its answer and
            nothing else blocks it.
        slots: where the answers are.
        drafts: the step's; the logits are not read.
        length: tokens of an n-gram, >= 2.
    """
    repeat_kernel[(slots.idx_mapping.shape[0],)](
        blocked,
        slots.idx_mapping,
        slots.all_token_ids,
        slots.all_token_ids.stride(0),
        slots.prompt_len,
        slots.total_len,
        drafts.draft_token_ids,
        drafts.cu_num_draft_tokens,
        BONUS_ROW_IS_LAST=drafts.bonus_row_is_last,
        LENGTH=length,
        DRAFTS=DRAFTS,
        BLOCK=BLOCK,
    )
