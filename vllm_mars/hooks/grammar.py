"""Leaves tokens that a grammar forbids in probabilistic drafts, for verification to reject.

Verification of a probabilistic draft is lossless only if its length does not depend on the sampled
tokens. vLLM's scheduler truncates a draft before its first forbidden token, and with asynchronous
scheduling replaces that token by -1. Then the next token is sampled from p instead of the residual
max(p - q, 0), so tokens that the draft proposes and the grammar allows become too frequent.

With these hooks the draft keeps its first forbidden token, which the grammar's mask gives
probability 0. The mask depends only on the tokens before a position.
"""

import dataclasses
from typing import Any

from vllm_mars.options.config import MarsConfig


def keep_forbidden_drafts(scheduler: Any, _: MarsConfig) -> None:
    """Wraps a scheduler's methods to keep forbidden tokens in probabilistic drafts."""
    # Fixed drafts and greedy requests are exact at any draft length.
    if scheduler.vllm_config.speculative_config.draft_sample_method != "probabilistic":
        return
    from vllm.v1.outputs import DraftTokenIds

    is_async = scheduler.vllm_config.scheduler_config.async_scheduling
    update_draft_token_ids = scheduler.update_draft_token_ids
    get_grammar_bitmask = scheduler.get_grammar_bitmask

    def update_and_keep(draft_token_ids: Any) -> None:
        update_draft_token_ids(draft_token_ids)
        drafts = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        for request_id, draft in drafts:
            request = scheduler.requests.get(request_id)
            # vLLM drops drafts during chunked prefill.
            if request is None or request.is_prefill_chunk or not request.use_structured_output:
                continue
            if request.sampling_params.temperature:
                request.spec_token_ids = draft

    def mark_and_get(scheduler_output: Any) -> Any:
        marked = scheduler_output
        if scheduler_output.has_structured_output_requests and not is_async:
            # The grammar cannot advance past a forbidden token: on a copy, vLLM marks it and the
            # tokens after it as invalid.
            drafts = scheduler_output.scheduled_spec_decode_tokens
            marked = dataclasses.replace(scheduler_output, scheduled_spec_decode_tokens={**drafts})
            draft_token_ids = DraftTokenIds([*drafts], [[*draft] for draft in drafts.values()])
            scheduler.update_draft_token_ids_in_output(draft_token_ids, marked)
            scheduler_output.num_invalid_spec_tokens = marked.num_invalid_spec_tokens
        grammar = get_grammar_bitmask(marked)
        if grammar is not None:
            # None if the scheduler has not seen the drafts yet.
            invalid = marked.num_invalid_spec_tokens or {}
            grammar.num_acceptable_drafts = [
                count + (req_id in invalid)
                for req_id, count in zip(
                    grammar.structured_output_request_ids,
                    grammar.num_acceptable_drafts,
                    strict=True,
                )
            ]
        return grammar

    scheduler.update_draft_token_ids = update_and_keep
    scheduler.get_grammar_bitmask = mark_and_get
