"""What V1 draws probabilistic drafts from: their requests' sampling parameters and seeds.

vLLM draws them by the temperature alone. Here they are drawn under penalties, top-k and top-p as
well, for which the tokens of the draft so far count, and at a share of the temperature. The
verification is lossless for any draft distribution that it is given, and is given these
probabilities. A greedy request's temperature, 0, stays what it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.sample.ops.penalties import apply_all_penalties

from vllm_mars.options.config import MarsConfig
from vllm_mars.worker.constraints import constrain
from vllm_mars.worker.draft_temperature import is_scaled, said_by


def wrap_drafter(
    runner: Any, config: MarsConfig, draft_shares: Callable[[int], torch.Tensor]
) -> None:
    """Lets a drafter of the V1 runner draw by its requests' sampling parameters and seeds.

    vLLM draws all drafts from the numbers of the process, so that no seed would repeat an answer.

    Args:
        runner: vLLM's. If its drafter draws, the drafter's `_sample_from_logits`, which all of its
            drafts are drawn by, and the runner's `propose_draft_token_ids`, which is told the
            step's tokens, are wrapped, on these instances alone.
        config: the options.
        draft_shares: gives those of the batch's first requests; float32.

    Raises:
        RuntimeError: the option is given, but this drafter draws nothing; or it does not say.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    drafter = runner.drafter
    # No other class draws.
    draws = isinstance(drafter, SpecDecodeBaseProposer) and bool(
        said_by(drafter, "_enable_probabilistic_draft_probs")
    )
    scales = is_scaled(draws, drafter, config)
    if not draws:
        return
    sample_from_logits, propose = drafter._sample_from_logits, runner.propose_draft_token_ids
    # Of each request the tokens of this step that vLLM's lists of output tokens do not hold yet;
    # and the draft tokens after these, a tensor for each draft step.
    emitted: list[list[int]] = []
    drafted: list[torch.Tensor] = []

    def propose_and_note(scheduler_output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        emitted[:] = sampled.tolist() if isinstance(sampled, torch.Tensor) else [[]] * len(sampled)
        drafted.clear()
        return propose(scheduler_output, sampled, *args, **kwargs)

    def sample(logits: torch.Tensor, sampling_metadata: Any) -> Any:
        # None where all requests are greedy.
        if (temperature := sampling_metadata.temperature) is None:
            return sample_from_logits(logits, sampling_metadata)
        if scales:
            scaled = temperature * draft_shares(len(temperature))
            sampling_metadata = replace(sampling_metadata, temperature=scaled)
        own = under_parameters(logits, sampling_metadata, emitted, drafted)
        drawn, probs = sample_from_logits(*own)
        # A request may have several rows, one after the other.
        own = probs.view(len(temperature), -1, probs.shape[-1])
        for place, generator in sampling_metadata.generators.items():
            if temperature[place] > 0:
                noise = torch.empty_like(own[place]).exponential_(generator=generator)
                drawn.view(len(own), -1)[place] = (own[place] / noise).argmax(-1)
        drafted.append(drawn)
        return drawn, probs

    drafter._sample_from_logits, runner.propose_draft_token_ids = sample, propose_and_note


def under_parameters(
    logits: torch.Tensor,
    sampling_metadata: Any,
    emitted: Sequence[list[int]],
    drafted: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, Any]:
    """Draft logits under their requests' parameters.

    Args:
        logits: `[n * batch, vocab]`, n rows of each request, which may be written.
        sampling_metadata: of the requests, some of which sample.
        emitted: tokens of each request that its list of output tokens lacks; -1 is none.
        drafted: draft tokens of the requests, `[batch]` for each draft step so far.

    Returns:
        The logits, and the metadata with the temperature that they are still to be divided by:
        without penalties, top-k and top-p as they were given.
    """
    has_penalties = not sampling_metadata.no_penalties
    if has_penalties:
        logits = _penalized(logits.float(), sampling_metadata, emitted, drafted)
    if not has_penalties and sampling_metadata.top_k is sampling_metadata.top_p is None:
        return logits, sampling_metadata
    temperature = sampling_metadata.temperature
    num_rows = [len(logits) // len(temperature)] * len(temperature)
    logits = constrain(logits.float(), num_rows, sampling_metadata)
    return logits, replace(sampling_metadata, temperature=temperature.sign())


def _penalized(
    logits: torch.Tensor,
    sampling_metadata: Any,
    emitted: Sequence[list[int]],
    drafted: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Draft logits under their requests' penalties; float32, written."""
    num_rows = len(logits) // len(sampling_metadata.temperature)
    # Tokens that are drawn at once do not know each other.
    drafts = (
        torch.stack([*drafted], 1).tolist() if drafted and num_rows == 1 else [[]] * len(logits)
    )
    of_requests = zip(sampling_metadata.output_token_ids, emitted, drafts, strict=False)
    # vLLM does not count -1.
    output = [[*own, *new, *draft] for own, new, draft in of_requests for _ in range(num_rows)]
    prompts, presence, frequency, repetition = (
        values.repeat_interleave(num_rows, dim=0)
        for values in (
            sampling_metadata.prompt_token_ids,
            sampling_metadata.presence_penalties,
            sampling_metadata.frequency_penalties,
            sampling_metadata.repetition_penalties,
        )
    )
    penalized: torch.Tensor = apply_all_penalties(
        logits, prompts, presence, frequency, repetition, output
    )
    return penalized
