"""`mars_max_loss` on a real V2 engine: each prefix of 150 greedy answers keeps its bound.

A forward pass of the target gives the loss. Batches mix bounds, and greedy with sampled requests,
and memory is short enough to preempt requests. `test_controls.py` tests V1.
"""

import numpy as np
import pytest

import tiny_models
import workload
from promise import check_promise

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


NUM_ANSWERS = 200
# Nats per token; None uses the server's bound.
BOUNDS = (None, 0.03, 0.01, 0.0)
SERVER = {"rejection_sample_method": "mars", "mars_price": 1000.0, "mars_max_loss": 0.05}
# Two requests fill these blocks before they end.
MEMORY = {"max_num_seqs": 4, "block_size": 32, "num_gpu_blocks_override": 7}


@pytest.mark.timeout(1600)
def test_each_answer_of_v2_keeps_its_bound(models):
    rng, requests = np.random.default_rng(0), []
    for number in range(NUM_ANSWERS):
        prompt = rng.integers(3, tiny_models.VOCAB, rng.integers(2, 30)).tolist()
        bound = BOUNDS[number // 2 % len(BOUNDS)]
        extra_args = {"mars_return": True}
        if bound is not None:
            extra_args["mars_max_loss"] = bound
        # The second half alternates between greedy and sampled requests.
        sampling = {
            "temperature": float(number >= NUM_ANSWERS // 2 and number % 2),
            "seed": number,
            "max_tokens": 24,
            "ignore_eos": True,
            "extra_args": extra_args,
        }
        requests.append((prompt, sampling))
    result = workload.run(
        workload.draft_model(models[1], **SERVER),
        [requests],
        v2=True,
        timeout=1500,
        model=str(models[0]),
        max_model_len=64,
        **MEMORY,
    )
    assert result["metrics"][-1]["vllm:num_preemptions"] > 0
    lost = dict.fromkeys(BOUNDS, 0.0)
    for (prompt, sampling), (answer,) in zip(requests, result["batches"][0], strict=True):
        tokens, returned = answer["tokens"], answer["returned"]
        if sampling["temperature"]:
            assert len(returned["log_ratios"]) == len(tokens)
            continue
        requested = sampling["extra_args"].get("mars_max_loss")
        bound = SERVER["mars_max_loss"] if requested is None else requested
        lost[requested] += check_promise(models[2], prompt, tokens, returned, bound)
    # Every bound limits its requests.
    assert lost[None] > lost[0.03] > lost[0.01] > lost[0.0] == 0
