"""Two tensor-parallel ranks on a CPU verify by MARS and emit the tokens of one rank."""

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
    """Runs in each worker; returns the sampler's class."""
    return type(worker.model_runner.rejection_sampler).__qualname__


def models_and_config(directory):
    """Writes a tiny target and its head; returns the target and a config with a moderate theta.

    A theta that accepts every runner-up would show differences of rounding.
    """
    target, head = directory / "target", directory / "eagle"
    tiny_models.eagle(head, tiny_models.llama(target))
    return target, {
        "method": "eagle",
        "model": str(head),
        "num_speculative_tokens": tiny_models.NUM_DRAFT_TOKENS,
        "rejection_sample_method": "mars",
        "mars_theta": 0.5,
    }


def generate(target, speculative_config, ranks):
    """Returns greedy tokens, the acceptance rate, the ranks' samplers, and relaxed tokens."""
    with engine_in_process(target, speculative_config, tensor_parallel_size=ranks) as llm:
        samplers = llm.collective_rpc(look_at_worker)
        tokens, counts = greedy_tokens(llm, PROMPTS, max_tokens=40), counters(llm)
        relaxed = [m.value for m in llm.get_metrics() if m.name == "vllm:mars_relaxed_tokens"]
    drafted, accepted = (
        counts[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")
    )
    return tokens, accepted / drafted, samplers, sum(relaxed)


def test_two_ranks_emit_what_one_emits(tmp_path, monkeypatch):
    target, mars = models_and_config(tmp_path)
    one = generate(target, mars, ranks=1)
    assert one[3] > 0
    # vLLM requires a binding of cores on one memory node.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    two = generate(target, mars, ranks=2)
    assert two[2] == ["MarsRejectionSampler"] * 2
    assert two[:2] == one[:2]
