"""Few and small V2 engines, whose kernels run in the interpreter."""

import re

import pytest

import workload
from workload import draft_model, eagle

pytestmark = pytest.mark.engine


def run(speculative_config, batches, models, **options):
    return workload.run(
        speculative_config,
        [list(batch.values()) for batch in batches],
        v2=True,
        model=str(models / "target"),
        **options,
    )


@pytest.mark.nightly
def test_draft_model(models):
    """All kinds at once, with prompts in chunks, then some from the cache."""
    requests = workload.every_kind(7) | workload.long_prompts(70, 4, seed=14)
    again = {name: requests[name] for name in ("greedy", "sampled", "greedy, long prompt")}
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "block_size": 32}
    block = draft_model(models / "draft", rejection_sample_method="block")
    vllms = run(block, [requests, again], models, **options)
    mars = run(
        draft_model(models / "draft", **workload.STRICT_PRICE), [requests, again], models, **options
    )
    assert vllms["has_draft_logits"]
    but = workload.BY_BLOCKS or workload.UNDER_PARAMETERS
    workload.assert_same_batches([requests, again], vllms, mars, but=but)
    assert vllms["metrics"][-1]["vllm:prefix_cache_hits"] > 0
    assert workload.finish_reasons(vllms, 0) == {"length", "stop"}
    assert (
        "Margin-aware verification (MARS) is on: mars_price=0 nats per token, no mars_max_loss, "
        "mars_strict_opening=8, 1 protected tokens, model runner V2; the output is lossless"
        in mars["log"]
    )
    assert "Margin-aware" not in vllms["log"]
    message = r"the logits of probabilistic drafts: \d+\.\d MiB of this device \(\d+ x 3 x \d+"
    assert re.search(message, mars["log"])
    relaxed = run(draft_model(models / "draft", **workload.RELAXED), [again], models, **options)
    assert workload.accepted_share(relaxed, 0) > workload.accepted_share(vllms, 1)


@pytest.mark.nightly
def test_eagle_and_a_small_cache(models):
    """Requests are preempted and resume; a price accepts more."""
    crowd = workload.crowded(4, 20, 20)
    options = {
        "max_num_seqs": 4,
        "block_size": 32,
        "num_gpu_blocks_override": 6,
        "logprobs_mode": "processed_logprobs",
    }
    vllms = run(eagle(models), [crowd], models, **options)
    mars = run(eagle(models, **workload.STRICT_PRICE), [crowd], models, **options)
    assert not vllms["has_draft_logits"]
    assert vllms["metrics"][-1]["vllm:num_preemptions"] > 0
    workload.assert_same_batches([crowd], vllms, mars)
    relaxed = run(eagle(models, **workload.RELAXED), [crowd], models, **options)
    assert "mars_price=1000 nats" in relaxed["log"]
    assert "the output is LOSSY: it can differ from the target's own." in relaxed["log"]
    assert workload.accepted_share(relaxed, 0) > workload.accepted_share(vllms, 0)
