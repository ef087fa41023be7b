"""Works around a vLLM crash on CPU: chunked prefill of a seeded request.

vLLM undoes draws made before the prefill ends by the generator's offset, which CPU generators lack.
`tests/conformance/test_engine_v1.py` shows whether this is still needed.
"""

from typing import Any

import numpy as np


def exclude_prefill_seeds(runner: Any) -> None:
    """Wraps a V1 runner's `sample_tokens` to hide the generators of requests in prefill."""
    sample_tokens = runner.sample_tokens

    def sample_without_prefill_seeds(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        is_prefill = runner.discard_request_mask.np[: batch.num_reqs]
        generators = batch.generators
        hidden = {
            int(req_idx): generators.pop(int(req_idx))
            for req_idx in np.flatnonzero(is_prefill)
            if req_idx in generators
        }
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            generators.update(hidden)

    runner.sample_tokens = sample_without_prefill_seeds
