"""V1 engines: at theta 1 or price 0 MARS answers as vLLM's sampler does."""

import pytest

import workload
from workload import draft_model, eagle

pytestmark = pytest.mark.engine

CROWD = workload.crowded(8, 20, 70)
STOPS = workload.stop_strings(40)
TOGETHER = {
    f"greedy {i}": (workload.prompt(90 + i, 4 + i), workload.greedy(max_tokens=12 + 5 * (i % 3)))
    for i in range(9)
} | {
    "sampled": (workload.prompt(99), workload.sampled(31)),
    "sampled, relaxed": (workload.prompt(98), workload.sampled(32, max_tokens=20)),
}
# Requests with a strict option of their own.
STRICT = ("greedy 8", "sampled")
BATCHES = [list(batch.values()) for batch in (CROWD, STOPS, TOGETHER)]


def test_every_kind_of_request(models):
    """All kinds at once, then prompts in chunks, and the same prompts from the cache."""
    requests, long = workload.every_kind(), workload.long_prompts(110, 8, seed=None)
    batches = [list(requests.values()), list(long.values()), list(long.values())]
    options = {
        "model": str(models / "target"),
        "max_num_seqs": 12,
        # A step holds twelve short prompts, but not one long prompt.
        "max_num_batched_tokens": 80,
        "block_size": 32,
    }
    # vLLM's V1 cannot verify probabilistic drafts by blocks.
    fixed = {"draft_sample_method": "greedy"}
    vllms = workload.run(draft_model(models / "draft", **fixed), batches, **options)
    mars = workload.run(
        draft_model(models / "draft", **fixed, **workload.STRICT), batches, **options
    )
    workload.assert_same_batches([requests, long, long], vllms, mars)
    # The plugin is installed in both.
    assert (vllms["sampler"], mars["sampler"]) == ("RejectionSampler", "MarsRejectionSampler")
    assert vllms["metrics"][-1]["vllm:prefix_cache_hits"] > 0
    assert workload.finish_reasons(vllms, 0) == {"length", "stop"}


def test_a_prompt_in_chunks_uses_no_random_number_of_its_seed(models):
    """Compares prompts in chunks with whole prompts from the cache; vLLM without MARS crashes."""
    requests = workload.long_prompts(110, 8, seed=5)
    mars = workload.run(
        eagle(models, **workload.STRICT),
        [list(requests.values())] * 2,
        model=str(models / "target"),
        max_num_seqs=12,
        max_num_batched_tokens=80,
        block_size=32,
    )
    assert mars["metrics"][-1]["vllm:prefix_cache_hits"] > 0
    workload.assert_same(list(requests), *mars["batches"])


@pytest.fixture(scope="module")
def small_cache(models, packaged_model):
    """Engine arguments: few blocks, a tokenizer for stop strings, processed logprobs."""
    return {
        "model": str(models / "target"),
        "tokenizer": str(packaged_model),
        "skip_tokenizer_init": False,
        "max_num_seqs": 8,
        "block_size": 32,
        "num_gpu_blocks_override": 14,
        "logprobs_mode": "processed_logprobs",
    }


@pytest.fixture(scope="module")
def vllms(models, small_cache):
    return workload.run(eagle(models), BATCHES, **small_cache)


@pytest.mark.nightly
def test_small_cache(models, small_cache, vllms):
    """Requests are preempted and resume, and stop at strings."""
    mars = workload.run(eagle(models, **workload.STRICT_PRICE), BATCHES, **small_cache)
    assert vllms["metrics"][-1]["vllm:num_preemptions"] > 0
    workload.assert_same_batches([CROWD, STOPS, TOGETHER], vllms, mars)
    assert "stop" in workload.finish_reasons(vllms, 1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rule", "strict"),
    [({"mars_theta": 0.3}, {"mars_theta": 1.0}), ({"mars_max_loss": 0.5}, {"mars_price": 0.0})],
    ids=str,
)
def test_a_batch_changes_no_answer_and_strict_requests_get_vllms(models, vllms, rule, strict):
    together = [
        (prompt, {**sampling, "extra_args": strict} if name in STRICT else sampling)
        for name, (prompt, sampling) in TOGETHER.items()
    ]
    mars = workload.run(
        eagle(models, rejection_sample_method="mars", **rule),
        [together, *([one] for one in together)],
        model=str(models / "target"),
        max_num_seqs=12,
    )
    batch, separate = mars["batches"][0], [answers for (answers,) in mars["batches"][1:]]
    workload.assert_same(list(TOGETHER), batch, separate)
    expected = dict(zip(TOGETHER, vllms["batches"][2], strict=True))
    answers = dict(zip(TOGETHER, batch, strict=True))
    for name in STRICT:
        assert answers[name][0]["tokens"] == expected[name][0]["tokens"], name
    assert any(answers[name] != expected[name] for name in answers), "nothing was relaxed"
