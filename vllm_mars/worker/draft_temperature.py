"""What drawn drafts are drawn at: a share of each request's temperature, and with which numbers.

vLLM divides the draft's logits by the request's temperature, and the share goes into that divisor.
So verification, which is given the probabilities (V1) or divides the same logits by the same number
again (V2), sees the very distribution that was drawn from, in whatever dtype the logits are kept. A
greedy request's temperature, 0, stays what it is.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from vllm_mars.options.config import MarsConfig
from vllm_mars.releases import draws_anew

if TYPE_CHECKING:
    from vllm_mars.worker.requests_v2 import RequestsV2

logger = init_logger("vllm.vllm_mars.worker.draft_temperature")


def scale_v1(drafter: Any, config: MarsConfig, draft_shares: Callable[[int], torch.Tensor]) -> None:
    """Lets a drafter of the V1 runner draw at a share of the temperature, and by requests' seeds.

    vLLM draws all drafts from the numbers of the process, so that no seed would repeat an answer.

    Args:
        drafter: of vLLM's V1 runner. If it draws, its `_sample_from_logits`, which all of its
            drafts are drawn by, is wrapped, on this instance alone.
        config: the options.
        draft_shares: gives those of the batch's first requests; float32.

    Raises:
        RuntimeError: the option is given, but this drafter draws nothing; or it does not say.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    # No other class draws.
    draws = isinstance(drafter, SpecDecodeBaseProposer) and bool(
        _said_by(drafter, "_enable_probabilistic_draft_probs")
    )
    is_scaled = _is_scaled(draws, drafter, config)
    if not draws:
        return
    sample_from_logits = drafter._sample_from_logits

    def sample(logits: torch.Tensor, sampling_metadata: Any) -> Any:
        # None where all requests are greedy.
        if (temperature := sampling_metadata.temperature) is None:
            return sample_from_logits(logits, sampling_metadata)
        if is_scaled:
            scaled = temperature * draft_shares(len(temperature))
            sampling_metadata = replace(sampling_metadata, temperature=scaled)
        drawn, probs = sample_from_logits(logits, sampling_metadata)
        # A request may have several rows, one behind the other.
        own = probs.view(len(temperature), -1, probs.shape[-1])
        for place, generator in sampling_metadata.generators.items():
            if temperature[place] > 0:
                noise = torch.empty_like(own[place]).exponential_(generator=generator)
                drawn.view(len(own), -1)[place] = (own[place] / noise).argmax(-1)
        return drawn, probs

    drafter._sample_from_logits = sample


def scale_v2(runner: Any, config: MarsConfig, requests: "RequestsV2") -> bool:
    """Lets the speculator of a V2 runner draw at a share of the temperature.

    vLLM draws by seed and position. Verified by blocks, a draft stays or not by the numbers of all
    its positions, so the next step must not meet them again. Where vLLM does not see to that, the
    seeds given to the speculator change with each step.

    Args:
        runner: vLLM's V2 `GPUModelRunner`. If its speculator draws, `propose`, which copies
            temperatures and seeds to where its CUDA graphs read them, is wrapped, on this instance
            alone: it is given those that the requests keep.
        config: the options.
        requests: of the runner.

    Returns:
        Whether seeds are to change with each step.

    Raises:
        RuntimeError: the option is given, but this speculator draws nothing; or it does not say.
    """
    speculator = runner.speculator
    draws = _said_by(speculator, "draft_logits") is not None
    seeds_change = draws and not draws_anew()
    if not _is_scaled(draws, speculator, config) and not seeds_change:
        return False
    propose = speculator.propose
    names = list(inspect.signature(propose).parameters)
    places = {names.index("temperature"): "temperature"}
    if seeds_change:
        places[names.index("seeds")] = "seeds"

    def propose_anew(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        # By place in a step, by name in vLLM's dummy run.
        for (place, name), own in zip(places.items(), requests.drawn_with, strict=False):
            if place < len(given):
                given[place] = own
            else:
                kwargs[name] = own
        return propose(*given, **kwargs)

    speculator.propose = propose_anew
    return seeds_change


def _said_by(drafter: Any, name: str) -> Any:
    """An attribute by which vLLM's drafters say whether they draw."""
    try:
        return getattr(drafter, name)
    except AttributeError:
        raise RuntimeError(
            f"{type(drafter).__name__} has no {name}, by which vllm-mars knows whether it draws "
            "drafts; install a vLLM that it knows, or drop rejection_sample_method 'mars'."
        ) from None


def _is_scaled(draws: bool, drafter: Any, config: MarsConfig) -> bool:
    """Whether there is something to scale, which the log then says."""
    if not draws and config.draft_temperature is not None:
        raise RuntimeError(
            f"mars_draft_temperature={config.draft_temperature} is given, but "
            f"{type(drafter).__name__} draws no drafts; drop the option, or draft with a head or a "
            "draft model."
        )
    if not draws or config.draft_share == 1:
        return False
    logger.info(
        "Drafts are drawn at %g times each request's temperature (mars_draft_temperature).",
        config.draft_share,
    )
    return True
