"""Real engines on Model Runner V2, whose Triton kernels the interpreter runs: few and small."""

import re

import pytest

import workload
from vllm_mars.releases import draws_anew
from workload import draft_model, eagle

pytestmark = pytest.mark.engine
# What vLLM 0.32's `block` meets again in its next step, later ones and MARS do not.
BY_BLOCKS = () if draws_anew() else ("sampled",)


def run(speculative_config, batches, models, **options):
    return workload.run(
        speculative_config,
        [list(batch.values()) for batch in batches],
        v2=True,
        model=str(models / "target"),
        **options,
    )


def test_theta_1_is_vllm(models):
    """A greedy and a sampled request; the night has all kinds."""
    every = workload.every_kind(6)
    requests = {name: every[name] for name in ("greedy", "sampled")}
    own = run(draft_model(models, rejection_sample_method="block"), [requests], models)
    mars = run(draft_model(models, **workload.STRICT_PRICE), [requests], models)
    assert own["has_draft_logits"]
    said = r"the logits of probabilistic drafts: \d+\.\d MiB of this device \(\d+ x 3 x \d+"
    assert re.search(said, mars["log"])
    workload.assert_same_batches([requests], own, mars, but=BY_BLOCKS)
    assert 0 < workload.accepted_share(own, 0) < 1


@pytest.mark.nightly
def test_draft_model(models):
    """Drafts with probabilities, all kinds of requests; a price accepts more.

    All kinds come at once, with prompts that are cut into chunks, then some again from the cache.
    """
    requests = workload.every_kind(7) | workload.long_prompts(70, 4, seed=14)
    again = {name: requests[name] for name in ("greedy", "sampled", "greedy, long prompt")}
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "block_size": 32}
    block = draft_model(models, rejection_sample_method="block")
    own = run(block, [requests, again], models, **options)
    mars = run(draft_model(models, **workload.STRICT_PRICE), [requests, again], models, **options)
    assert own["has_draft_logits"]
    but = BY_BLOCKS or workload.UNDER_PARAMETERS
    workload.assert_same_batches([requests, again], own, mars, but=but)
    assert own["metrics"][-1]["vllm:prefix_cache_hits"] > 0
    assert workload.finish_reasons(own, 0) == {"length", "stop"}
    assert (
        "Margin-aware verification (MARS) is on: mars_theta=1, no mars_max_loss, "
        "mars_strict_opening=0, 1 protected tokens, model runner V2; the output is lossless"
        in mars["log"]
    )
    assert "Margin-aware" not in own["log"]
    relaxed = run(draft_model(models, **workload.RELAXED), [again], models, **options)
    assert workload.accepted_share(relaxed, 0) > workload.accepted_share(own, 1)


@pytest.mark.nightly
def test_eagle_and_a_small_cache(models):
    """Requests are preempted and resume; the other logprobs; price 0; then a price accepts more."""
    crowd = workload.crowded(4, 20, 20)
    options = {
        "max_num_seqs": 4,
        "block_size": 32,
        "num_gpu_blocks_override": 6,
        "logprobs_mode": "processed_logprobs",
    }
    own = run(eagle(models), [crowd], models, **options)
    mars = run(eagle(models, **workload.STRICT_PRICE), [crowd], models, **options)
    assert not own["has_draft_logits"]
    assert own["metrics"][-1]["vllm:num_preemptions"] > 0
    workload.assert_same_batches([crowd], own, mars)
    relaxed = run(eagle(models, **workload.RELAXED), [crowd], models, **options)
    assert "mars_price=1000 nats" in relaxed["log"]
    assert "the output is LOSSY: it can differ from the target's own." in relaxed["log"]
    assert workload.accepted_share(relaxed, 0) > workload.accepted_share(own, 0)


@pytest.mark.nightly
def test_requests_differ_within_a_batch(models):
    """Each its own: strict, in a span that its prompt opened, within its bound, without a bound."""
    prompts = [[5, 6, 7, 8], [100, 3, 200], [7, 7, 7, 7], [31, 32, 33]]
    chosen = [{"mars_price": 0}, {}, {}, {"mars_max_loss": 0}]
    own, mine = (
        {
            str(number): (prompt, workload.greedy(max_tokens=12, extra_args=extra))
            for number, (prompt, extra) in enumerate(zip(prompts, of_each, strict=True))
        }
        for of_each in ([{}] * 4, [{"mars_return": True, **extra} for extra in chosen])
    )
    drafts = draft_model(models, draft_sample_method="greedy")
    mars = {**drafts, "rejection_sample_method": "mars", "mars_theta": 0.01, "mars_max_loss": 0.5}
    mars["mars_strict_spans"] = [[3, None]]
    engine = {"max_num_seqs": 4, "max_model_len": 64}
    plain = run(drafts, [own], models, **engine)["batches"][0]
    found = run(mars, [mine], models, **engine)["batches"][0]
    is_same = [a["tokens"] == b["tokens"] for (a,), (b,) in zip(plain, found, strict=True)]
    assert is_same == [True, True, False, True]
    relaxed = [answer["returned"]["relaxed_positions"] for (answer,) in found]
    assert [bool(positions) for positions in relaxed] == [False, False, True, False]
