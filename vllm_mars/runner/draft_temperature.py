"""What drawn drafts are drawn at: a share of each request's temperature, and with which numbers.

vLLM divides the draft's logits by the request's temperature, and the share goes into that divisor.
So verification, which is given the probabilities (V1) or divides the same logits by the same number
again (V2), sees the very distribution that was drawn from, in whatever dtype the logits are kept. A
greedy request's temperature, 0, stays what it is.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from vllm_mars.config import MarsConfig

if TYPE_CHECKING:
    from vllm_mars.runner.requests_v2 import RequestsV2

logger = init_logger("vllm.vllm_mars.runner.draft_temperature")


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


def scale_v2(
    runner: Any, config: MarsConfig, requests: "RequestsV2"
) -> Callable[[], torch.Tensor] | None:
    """Lets the speculator of a V2 runner draw at a share of the temperature.

    vLLM draws by seed and position. Verified by blocks, a draft stays or not by the numbers of all
    its positions, so the next step must not meet them again; vLLM 0.33 sees to that, and before it
    the seeds given to the speculator change with each step.

    Args:
        runner: vLLM's V2 `GPUModelRunner`. If its speculator draws, `propose`, which copies
            temperatures and seeds to where its CUDA graphs read them, is wrapped, on this instance
            alone.
        config: the options.
        requests: of the runner.

    Returns:
        It gives what drafts were drawn at last, float32 by slot, which verification has to divide
        their logits by as well; None for the request's own temperature.

    Raises:
        RuntimeError: the option is given, but this speculator draws nothing; or it does not say.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    speculator = runner.speculator
    draws = _said_by(speculator, "draft_logits") is not None
    is_scaled = _is_scaled(draws, speculator, config)
    seeds_repeat = not hasattr(gumbel, "spec_step_seed")
    if not draws or not (is_scaled or seeds_repeat):
        return None

    from vllm_mars.kernels.beside import draw_anew

    # Built on first use: what is allocated while the model is loaded can be memory that vLLM's
    # sleep mode throws away. A step may write to both: the speculator has copied what the last one
    # wrote, on the same stream.
    @functools.cache
    def drawn_at() -> torch.Tensor:
        return torch.zeros_like(runner.sampler.sampling_states.temperature.gpu)

    @functools.cache
    def new_seeds() -> torch.Tensor:
        return torch.zeros_like(runner.sampler.sampling_states.seeds.gpu)

    propose = speculator.propose
    names = list(inspect.signature(propose).parameters)

    def propose_anew(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        # With each model vLLM makes another sampler.
        batch, sampling = given["input_batch"], runner.sampler.sampling_states
        # Without a request that samples, no launch is added.
        if sampling.temperature.np[batch.idx_mapping_np].any():
            own = drawn_at() if is_scaled else None, new_seeds() if seeds_repeat else None
            # Of vLLM's, another buffer each time that a request comes.
            temperature, seeds = given["temperature"], given["seeds"]
            total_len = runner.req_states.total_len.gpu
            state = config.draft_share, requests.records, temperature, seeds, total_len
            draw_anew(*own, *state, batch.idx_mapping)
            given["temperature"] = temperature if own[0] is None else own[0]
            given["seeds"] = seeds if own[1] is None else own[1]
        return propose(**given)

    speculator.propose = propose_anew
    return drawn_at if is_scaled else None


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
