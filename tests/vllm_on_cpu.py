"""vLLM's own sampling on a CPU, mended, which the product is compared with.

Two kernels of vLLM 0.32.0 make its sampled output wrong under speculation, without any error:

- `expand_kernel` fills an int64 copy of its output and drops it, so for float32 and int32 the
  temperature, top-k and top-p of sampled requests are uninitialised memory.
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

    vLLM's registry holds each in a `KernelOverride` that everything launches. Registering a second
    time would scan every loaded module again, which vLLM 0.32 does not survive.
    """
    # With a Triton that drives this CPU, vLLM runs its Triton kernels, which are right.
    if HAS_TRITON:
        return
    for name, mended in _MENDED.items():
        override = getattr(rejection_sampler, name)
        original = override._impl
        if getattr(original, "func", None) is not mended:
            override._impl = functools.partial(mended, original)
