"""Temperature, top-k and top-p on a CPU."""

from collections.abc import Sequence

import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


def constrain(
    logits: torch.Tensor, num_rows: Sequence[int], sampling_metadata: SamplingMetadata
) -> torch.Tensor:
    """vLLM's `apply_sampling_constraints`, without the fault of its CPU kernel: see `releases`.

    Args:
        logits: float32 `[sum(num_rows), vocab]`, written.
        num_rows: of each request.
        sampling_metadata: of the requests.
    """
    if sampling_metadata.all_greedy:
        return logits
    lengths = torch.tensor(num_rows, device=logits.device)
    temperature = sampling_metadata.temperature
    divisors = temperature.masked_fill(temperature == 0, 1).repeat_interleave(lengths)
    logits.div_(divisors[:, None])
    own = (
        None if values is None else values.repeat_interleave(lengths)
        for values in (sampling_metadata.top_k, sampling_metadata.top_p)
    )
    # With top-k alone this ends in an error where there is no row.
    return apply_top_k_top_p(logits, *own) if len(logits) else logits
