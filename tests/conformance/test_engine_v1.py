"""Real engines on the V1 model runner: MARS at theta = 1 answers as vLLM's own sampler does."""

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
# Those that ask for strict verification whatever the server does.
STRICT = ("greedy 8", "sampled")
BATCHES = [list(batch.values()) for batch in (CROWD, STOPS, TOGETHER)]


def test_every_kind_of_request(models):
    """All kinds at once; then prompts that come in chunks, and again from the cache."""
    requests, long = workload.every_kind(), workload.long_prompts(110, 8, seed=None)
    batches = [list(requests.values()), list(long.values()), list(long.values())]
    options = {
        "model": str(models / "target"),
        "max_num_seqs": 12,
        # Twelve short prompts fit into a step, one long prompt does not.
        "max_num_batched_tokens": 80,
        "block_size": 32,
    }
    # Probabilistic drafts vLLM's V1 cannot verify by blocks.
    fixed = {"draft_sample_method": "greedy"}
    own = workload.run(draft_model(models, **fixed), batches, **options)
    mars = workload.run(draft_model(models, **fixed, **workload.STRICT_PRICE), batches, **options)
    workload.assert_same_batches([requests, long, long], own, mars)
    # The plugin is installed, but asked for only in one of them.
    assert (own["sampler"], mars["sampler"]) == ("RejectionSampler", "MarsRejectionSampler")
    assert own["metrics"][-1]["vllm:prefix_cache_hits"] > 0
    assert workload.finish_reasons(own, 0) == {"length", "stop"}


def test_a_cut_prompt_draws_nothing_from_its_seed(models):
    """At which vLLM's own ends: in chunks, and again from the cache, whole."""
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
    """Engine arguments: few blocks, the tokenizer for stop strings, the other logprobs."""
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
def own(models, small_cache):
    return workload.run(eagle(models), BATCHES, **small_cache)


@pytest.mark.nightly
def test_small_cache(models, small_cache, own):
    """Requests are preempted and resume; stop strings; price 0 as the strict MARS."""
    mars = workload.run(eagle(models, **workload.STRICT_PRICE), BATCHES, **small_cache)
    assert own["metrics"][-1]["vllm:num_preemptions"] > 0
    workload.assert_same_batches([CROWD, STOPS, TOGETHER], own, mars)
    assert "stop" in workload.finish_reasons(own, 1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rule", "strict"),
    [({"mars_theta": 0.3}, {"mars_theta": 1.0}), ({"mars_max_loss": 0.5}, {"mars_price": 0.0})],
    ids=str,
)
def test_a_lossy_batch_answers_as_each_request_alone(models, own, rule, strict):
    """And a request that asks a lossy server for strict verification gets vLLM's own answer."""
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
    batch, alone = mars["batches"][0], [answers for (answers,) in mars["batches"][1:]]
    workload.assert_same(list(TOGETHER), batch, alone)
    expected = dict(zip(TOGETHER, own["batches"][2], strict=True))
    answers = dict(zip(TOGETHER, batch, strict=True))
    for name in STRICT:
        assert answers[name][0]["tokens"] == expected[name][0]["tokens"], name
    assert any(answers[name] != expected[name] for name in answers), "nothing was relaxed"
