"""Corrections of vLLM's sampling on a CPU, with which the product is compared.

Two CPU kernels of vLLM 0.32.0 produce wrong tokens for sampled requests under speculation:

- `expand_kernel` fills an int64 copy of its output, so float32 and int32 outputs (temperature,
  top-k and top-p) are uninitialised memory.
- `rejection_random_sample_kernel` uses the padding draft id -1 as an index.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample import rejection_sampler

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
    """Repeats each request's value for its draft tokens, as vLLM's `expand_kernel`."""
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
    """Runs vLLM's `rejection_random_sample_kernel` without padding ids.

    A padding id is replaced by token 0 with an infinite uniform number, so it is rejected.
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
    """Replaces vLLM's CPU kernels, once per process.

    vLLM's registry has a `KernelOverride` for each. Registering again would scan every loaded
    module, at which vLLM 0.32 fails.
    """
    # With the Triton interpreter vLLM runs its Triton kernels, which are right.
    if HAS_TRITON:
        return
    for name, mended in _MENDED.items():
        override = getattr(rejection_sampler, name)
        original = override._impl
        if getattr(original, "func", None) is not mended:
            override._impl = functools.partial(mended, original)
