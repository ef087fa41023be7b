"""Two tensor-parallel ranks on a CPU: MARS verifies on both, and they emit what one rank emits."""

import os

import pytest

import tiny_models
from engines import counters, engine_in_process, greedy_tokens

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs 2 cores, one for each rank"),
]

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 7, 7, 7]]


def look_at_worker(worker):
    """Runs in each worker."""
    return type(worker.model_runner.rejection_sampler).__qualname__


def generate(target, speculative_config, ranks):
    """Greedy tokens of each prompt, the share of drafts accepted, each rank's sampler, and how many
    tokens were relaxed.
    """
    with engine_in_process(target, speculative_config, tensor_parallel_size=ranks) as llm:
        samplers = llm.collective_rpc(look_at_worker)
        tokens, found = greedy_tokens(llm, PROMPTS, max_tokens=40), counters(llm)
        told = [it.value for it in llm.get_metrics() if it.name == "vllm:mars_relaxed_tokens"]
    drafted, accepted = (
        found[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")
    )
    return tokens, accepted / drafted, samplers, sum(told)


def test_two_ranks_emit_what_one_emits(tmp_path, monkeypatch):
    target, head = tmp_path / "target", tmp_path / "eagle"
    tiny_models.eagle(head, tiny_models.llama(target))
    mars = {
        "method": "eagle",
        "model": str(head),
        "num_speculative_tokens": tiny_models.NUM_DRAFT_TOKENS,
        "rejection_sample_method": "mars",
        # One that takes every runner-up would show rounding; this one takes some.
        "mars_theta": 0.5,
    }
    one = generate(target, mars, ranks=1)
    assert one[3] > 0
    # On one memory node vLLM wants to be told which cores are whose.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    two = generate(target, mars, ranks=2)
    assert two[2] == ["MarsRejectionSampler"] * 2
    assert two[:2] == one[:2]
