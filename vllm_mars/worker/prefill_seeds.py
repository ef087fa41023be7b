"""Mends what ends the engine: on a CPU, a prompt in chunks of a request with a seed.

What was drawn before its prompt is done vLLM takes back by the generator's offset, which a
generator on a CPU has not. `vllm_mars.releases` says until when, and
`tests/conformance/test_engine_v1.py` whether it is needed.
"""

from typing import Any

import numpy as np


def exclude_prefill_seeds(runner: Any) -> None:
    """Makes a step draw nothing from the seeds of requests whose prompts are not done.

    Args:
        runner: vLLM's V1 `GPUModelRunner`. Its `sample_tokens` is wrapped, on this instance alone.
    """
    sample_tokens = runner.sample_tokens

    def sample_without(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        is_cut = runner.discard_request_mask.np[: batch.num_reqs]
        generators = batch.generators
        req_indices = [int(req_idx) for req_idx in np.flatnonzero(is_cut) if req_idx in generators]
        spared = {req_idx: generators.pop(req_idx) for req_idx in req_indices}
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            generators.update(spared)

    runner.sample_tokens = sample_without
