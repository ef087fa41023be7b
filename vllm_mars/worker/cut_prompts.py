"""Mends a fault of vLLM 0.32.0: on a CPU a seeded prompt in chunks ends the engine.

What was drawn before its prompt is done is taken back by the generator's offset, which a generator
on a CPU has not. Only a CPU server that asks for MARS is mended. The mend can go when a supported
vLLM passes `tests/conformance/test_engine_v1.py` without it.
"""

from typing import Any

import numpy as np


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
