"""Samples V1's probabilistic drafts with their requests' sampling parameters and seeds.

vLLM applies only the temperature. Here penalties (which count the draft's tokens), top-k, top-p and
the draft temperature apply as well. Verification is lossless for any draft distribution, and gets
these probabilities.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.sample.ops.penalties import apply_all_penalties

from vllm_mars.options.config import MarsConfig
from vllm_mars.worker.constraints import constrain
from vllm_mars.worker.draft_temperature import drafter_attribute, scales_temperature

# Rows are cut to the largest top-k of a batch before the sort, unless that is larger.
MAX_CANDIDATES = 1024


def wrap_drafter(
    runner: Any,
    config: MarsConfig,
    # `RequestsV1.draft_shares`
    draft_shares: Callable[[int], torch.Tensor],
) -> None:
    """Makes a V1 runner's drafter use its requests' sampling parameters and seeds."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    drafter = runner.drafter
    # Other drafter classes have fixed drafts.
    is_probabilistic = isinstance(drafter, SpecDecodeBaseProposer) and bool(
        drafter_attribute(drafter, "_enable_probabilistic_draft_probs")
    )
    is_scaled = scales_temperature(is_probabilistic, drafter, config)
    if not is_probabilistic:
        return
    sample_from_logits = drafter._sample_from_logits
    propose = runner.propose_draft_token_ids
    # For each request, tokens of this step that vLLM's output token lists still lack.
    emitted: list[list[int]] = []
    # For each draft step so far, the sampled tokens `[batch]`.
    drafted: list[torch.Tensor] = []

    def propose_and_note(scheduler_output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        emitted[:] = sampled.tolist() if isinstance(sampled, torch.Tensor) else [[]] * len(sampled)
        drafted.clear()
        return propose(scheduler_output, sampled, *args, **kwargs)

    def sample(logits: torch.Tensor, sampling_metadata: Any) -> Any:
        temperature = sampling_metadata.temperature
        if temperature is None:
            # All requests are greedy.
            return sample_from_logits(logits, sampling_metadata)
        if is_scaled:
            scaled = temperature * draft_shares(len(temperature))
            sampling_metadata = replace(sampling_metadata, temperature=scaled)
        logits, sampling_metadata = under_parameters(logits, sampling_metadata, emitted, drafted)
        token_ids, probs = sample_from_logits(logits, sampling_metadata)
        # vLLM uses the global generator for all drafts, so no seed would repeat an answer.
        # A request may have several consecutive rows.
        token_ids_by_request = token_ids.view(len(temperature), -1)
        probs_by_request = probs.view(len(temperature), -1, probs.shape[-1])
        for req_idx, generator in sampling_metadata.generators.items():
            if temperature[req_idx] > 0:
                request_probs = probs_by_request[req_idx]
                noise = torch.empty_like(request_probs).exponential_(generator=generator)
                token_ids_by_request[req_idx] = (request_probs / noise).argmax(-1)
        drafted.append(token_ids)
        return token_ids, probs

    drafter._sample_from_logits = sample
    runner.propose_draft_token_ids = propose_and_note


def under_parameters(
    logits: torch.Tensor,
    sampling_metadata: Any,
    emitted: Sequence[list[int]],
    drafted: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, Any]:
    """Applies penalties, top-k and top-p to draft logits `[n * batch, vocab]`, maybe in place.

    Returns the logits and the metadata for vLLM's sampling: its temperature is 1 or 0 if the
    logits are already divided by it, as top-k and top-p require.
    """
    has_penalties = not sampling_metadata.no_penalties
    if has_penalties:
        logits = _penalized(logits.float(), sampling_metadata, emitted, drafted)
    if not has_penalties and sampling_metadata.top_k is sampling_metadata.top_p is None:
        return logits, sampling_metadata
    temperature, top_k = sampling_metadata.temperature, sampling_metadata.top_k
    num_rows = [len(logits) // len(temperature)] * len(temperature)
    logits = logits.float()
    if top_k is None or (largest := int(top_k.max())) > MAX_CANDIDATES:
        logits = constrain(logits, num_rows, sampling_metadata)
    else:
        # On a CPU vLLM sorts whole rows for top-p, which took 15% of a step with 151,936 tokens.
        values, token_ids = logits.topk(largest)
        values = constrain(values, num_rows, sampling_metadata)
        logits = torch.full_like(logits, -torch.inf).scatter_(1, token_ids, values)
    return logits, replace(sampling_metadata, temperature=temperature.sign())


def _penalized(
    logits: torch.Tensor,
    sampling_metadata: Any,
    emitted: Sequence[list[int]],
    drafted: Sequence[torch.Tensor],
) -> torch.Tensor:
    num_rows = len(logits) // len(sampling_metadata.temperature)
    # Several rows per request are sampled in parallel, so their tokens do not depend on each other.
    drafts: list[list[int]] = [[]] * len(logits)
    if drafted and num_rows == 1:
        drafts = torch.stack([*drafted], 1).tolist()
    # Padding with -1 is fine: vLLM does not count it.
    output_token_ids = [
        [*output, *new, *draft]
        for output, new, draft in zip(
            sampling_metadata.output_token_ids, emitted, drafts, strict=False
        )
        for _ in range(num_rows)
    ]

    def expand(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(num_rows, dim=0)

    penalized: torch.Tensor = apply_all_penalties(
        logits,
        prompt_token_ids=expand(sampling_metadata.prompt_token_ids),
        presence_penalties=expand(sampling_metadata.presence_penalties),
        frequency_penalties=expand(sampling_metadata.frequency_penalties),
        repetition_penalties=expand(sampling_metadata.repetition_penalties),
        output_token_ids=output_token_ids,
    )
    return penalized
