"""Temperature, top-k and top-p on a CPU."""

from collections.abc import Sequence

import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


def constrain(
    # [sum(num_rows), vocab], float32, modified in place
    logits: torch.Tensor,
    # Rows of each request.
    num_rows: Sequence[int],
    sampling_metadata: SamplingMetadata,
) -> torch.Tensor:
    """Applies them as vLLM's `apply_sampling_constraints`, without its CPU bug: see `releases`."""
    if sampling_metadata.all_greedy:
        return logits
    lengths = torch.tensor(num_rows, device=logits.device)
    temperature = sampling_metadata.temperature
    divisors = temperature.masked_fill(temperature == 0, 1).repeat_interleave(lengths)
    logits.div_(divisors[:, None])
    top_k = sampling_metadata.top_k
    if top_k is not None:
        top_k = top_k.repeat_interleave(lengths)
    top_p = sampling_metadata.top_p
    if top_p is not None:
        top_p = top_p.repeat_interleave(lengths)
    # With only top-k, vLLM's function fails if there are no rows.
    return apply_top_k_top_p(logits, top_k, top_p) if len(logits) else logits
