"""Mends faults of vLLM 0.32.0 in sampling on a CPU.

Two of its kernels make sampled output wrong under speculation, without any error:

- `expand_kernel` fills an int64 copy of its output and drops it, so for float32 and int32 the
  temperature, top-k and top-p of sampled requests are uninitialised memory.
- `rejection_random_sample_kernel` uses the padding draft id -1 as an index.

And a request with a seed whose prompt is cut into chunks ends the engine: what was drawn before its
prompt is done is taken back by the generator's offset, which a generator on a CPU has not.

Greedy requests meet none. Only a CPU server that asks for MARS is mended. The mend can go when a
supported vLLM passes `tests/runner/test_cpu_kernels.py` without it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.sample import rejection_sampler

logger = init_logger("vllm.vllm_mars.runner.cpu_kernels")

Kernel = Callable[..., None]


def expand(
    _original: Kernel,
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    *_launch_settings: object,
) -> None:
    """Repeats each request's value for its draft tokens, as vLLM's `expand_kernel`.

    Args:
        output: `[num_tokens]`, any dtype, written.
        values: `[batch]`, the same dtype.
        cu_num_tokens: `[batch]`, inclusive prefix sum.
        replace_from: a value that is replaced
        replace_to: by this one.
    """
    replaced = torch.where(values == replace_from, replace_to, values).to(output.dtype)
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(replaced.repeat_interleave(counts, output_size=output.shape[0]))


def random_sample(
    original: Kernel,
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform_probs: torch.Tensor,
    *rest: Any,
) -> None:
    """Runs vLLM's `rejection_random_sample_kernel` with padding drafts kept out of its indexing.

    A padding draft stands as token 0 with an infinite uniform number, which no probability reaches,
    so it is rejected. Arguments as in vLLM's kernel.
    """
    original(
        output_token_ids,
        cu_num_draft_tokens,
        draft_token_ids.clamp(min=0),
        draft_probs,
        target_probs,
        bonus_token_ids,
        recovered_token_ids,
        uniform_probs.masked_fill(draft_token_ids < 0, torch.inf),
        *rest,
    )


_MENDED: dict[str, Callable[..., None]] = {
    "expand_kernel": expand,
    "rejection_random_sample_kernel": random_sample,
}


def mend() -> None:
    """Puts the mended kernels in place of vLLM's CPU kernels, once per process.

    vLLM's registry holds each CPU kernel in a `KernelOverride` that everything launches, so the
    implementation is replaced inside it. Registering a second time instead would scan every loaded
    module again, which vLLM 0.32 does not survive once all of the engine is loaded.

    Raises:
        RuntimeError: vLLM's kernels are not where this mend looks for them.
    """
    # With a Triton that drives this CPU, vLLM runs its Triton kernels, which are right.
    if HAS_TRITON:
        return
    for name, mended in _MENDED.items():
        override = getattr(rejection_sampler, name)
        if not isinstance(override, KernelOverride):
            raise RuntimeError(
                f"vLLM's CPU kernel {name} is a {type(override).__name__}, not a KernelOverride, "
                "so its fault in sampling cannot be mended; use a supported vLLM release."
            )
        original = override._impl
        if getattr(original, "func", None) is not mended:
            override._impl = functools.partial(mended, original)
    logger.info(
        "Replaced vLLM's CPU kernels %s: as shipped they give wrong tokens to sampled "
        "requests under speculation.",
        " and ".join(_MENDED),
    )


def spare_cut_prompts(runner: Any) -> None:
    """Makes a step draw nothing from the seeds of requests whose prompts are not done.

    Args:
        runner: vLLM's V1 `GPUModelRunner`. Its `sample_tokens` is wrapped, on this instance alone.
    """
    sample_tokens = runner.sample_tokens

    def sample_without(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        is_cut = runner.discard_request_mask.np[: batch.num_reqs]
        generators = batch.generators
        places = [int(place) for place in np.flatnonzero(is_cut) if place in generators]
        spared = {place: generators.pop(place) for place in places}
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            generators.update(spared)

    runner.sample_tokens = sample_without
