"""Keeps what a grammar forbids in the drafts that are drawn, for verification to reject.

A drawn draft is verified losslessly only if its length does not depend on what was drawn. vLLM's
scheduler cuts it off before the first token that the grammar forbids; where steps are scheduled
ahead it tells the worker instead that nothing was drawn there. Either way the target's own
distribution follows, where the rest of it belongs, max(p - q, 0): too much comes of what the draft
proposes and the grammar allows.

So a draft stays as it is, and its first forbidden token is verified as any other. The grammar's
mask, which depends on the tokens before a position alone, leaves it no probability. Whatever the
mask does not forbid is verified by its probability, too.
"""

import dataclasses
from typing import Any

from vllm_mars.options.config import MarsConfig


def keep_forbidden_drafts(scheduler: Any, _: MarsConfig) -> None:
    """Makes a scheduler leave drafts that are drawn as they are.

    Fixed drafts, and those of greedy requests, are exact at any length.

    Args:
        scheduler: vLLM's `Scheduler`, or a subclass of it. Its `update_draft_token_ids` and
            `get_grammar_bitmask` are wrapped, on this instance alone.
    """
    if scheduler.vllm_config.speculative_config.draft_sample_method != "probabilistic":
        return
    from vllm.v1.outputs import DraftTokenIds

    is_ahead = scheduler.vllm_config.scheduler_config.async_scheduling
    update_draft_token_ids = scheduler.update_draft_token_ids
    get_grammar_bitmask = scheduler.get_grammar_bitmask

    def update_and_keep(draft_token_ids: Any) -> None:
        update_draft_token_ids(draft_token_ids)
        drafts = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        for request_id, draft in drafts:
            request = scheduler.requests.get(request_id)
            # vLLM drops the drafts of a prompt's chunk.
            if request is None or request.is_prefill_chunk or not request.use_structured_output:
                continue
            if request.sampling_params.temperature:
                request.spec_token_ids = draft

    def mark_and_get(scheduler_output: Any) -> Any:
        marked = scheduler_output
        if scheduler_output.has_structured_output_requests and not is_ahead:
            # The grammar takes no token that it forbids: vLLM's own marks for it and what follows.
            drafts = scheduler_output.scheduled_spec_decode_tokens
            marked = dataclasses.replace(scheduler_output, scheduled_spec_decode_tokens={**drafts})
            given = DraftTokenIds([*drafts], [[*draft] for draft in drafts.values()])
            scheduler.update_draft_token_ids_in_output(given, marked)
            scheduler_output.num_invalid_spec_tokens = marked.num_invalid_spec_tokens
        found = get_grammar_bitmask(marked)
        if found is not None:
            # Of drafts that the scheduler has not seen none is known to be forbidden.
            forbidden = marked.num_invalid_spec_tokens or {}
            ids, counts = found.structured_output_request_ids, found.num_acceptable_drafts
            found.num_acceptable_drafts = [
                count + (own in forbidden) for own, count in zip(ids, counts, strict=True)
            ]
        return found

    scheduler.update_draft_token_ids = update_and_keep
    scheduler.get_grammar_bitmask = mark_and_get
