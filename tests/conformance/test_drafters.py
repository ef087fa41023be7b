"""Drafters of today in real engines on Model Runner V2, whose kernels the interpreter runs."""

import math

import numpy as np
import pytest

import tiny_models
import workload
from test_adaptive import COSTS
from vllm_mars.releases import draws_anew

pytestmark = pytest.mark.engine
# What vLLM 0.32's `block` meets again in its next step, later ones and MARS do not.
BY_BLOCKS = () if draws_anew() else ("sampled",)
DRAWN = {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}
FIXED = {"rejection_sample_method": "standard"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder for the target, and one for each kind of draft."""
    directory = tmp_path_factory.mktemp("drafters")
    model = tiny_models.llama(directory / "target", added=0.005)
    for kind in ("dflash", "dflash2", "dspark"):
        tiny_models.dflash(directory / kind, model, kind)
    tiny_models.mimo(directory / "mimo")
    return directory


DRAFTERS = {
    "dspark": ("target", {"method": "dspark", "model": "dspark"}, DRAWN),
    "dflash2": ("target", {"method": "dflash", "model": "dflash2"}, DRAWN),
    "dflash": ("target", {"method": "dflash", "model": "dflash"}, FIXED),
    "mtp": ("mimo", {"method": "mtp"}, DRAWN),
}


def drafter(models, name):
    """A target, its drafts, and vLLM's own verification of them."""
    target, draft, own = DRAFTERS[name]
    given = {"num_speculative_tokens": 3 if "model" in draft else 1, **draft}
    if "model" in draft:
        given["model"] = str(models / draft["model"])
    return str(models / target), given, own


@pytest.mark.parametrize(
    "name",
    [
        "dspark",
        *(pytest.param(it, marks=pytest.mark.nightly) for it in ("dflash2", "dflash", "mtp")),
    ],
)
def test_price_0_is_vllm(models, name):
    target, given, own = drafter(models, name)
    engine = {"v2": True, "model": target, "max_num_seqs": 8}
    requests = {
        f"{'sampled' if i % 2 else 'greedy'} {i}": (
            workload.prompt(i),
            workload.sampled(i, max_tokens=16) if i % 2 else workload.greedy(max_tokens=16),
        )
        for i in range(4)
    }
    asked = [list(requests.values())]
    theirs = workload.run({**given, **own}, asked, **engine)
    mars = workload.run({**given, **workload.STRICT_PRICE}, asked, **engine)
    said = "Drafts are probabilistic" if own is DRAWN else "Drafts are fixed."
    assert said in mars["log"]
    assert mars["has_draft_logits"] == (own is DRAWN)
    workload.assert_same_batches([requests], theirs, mars, but=BY_BLOCKS)


@pytest.mark.nightly
@pytest.mark.parametrize("name", DRAFTERS)
def test_weights_are_exact(models, name):
    target, given, _ = drafter(models, name)
    engine = {"v2": True, "model": target, "max_num_seqs": 8}
    prompts = [workload.prompt(i) for i in range(8)]
    rule = {"rejection_sample_method": "mars", "mars_price": 1.0, "mars_strict_opening": 0}
    told = workload.sampled(None, max_tokens=48, extra_args={"mars_return": True})
    asked = [(prompt, {**told, "seed": i}) for i, prompt in enumerate(prompts)]
    mars = workload.run({**given, **rule}, [asked], **engine)
    ratios = [of["returned"]["log_ratios"] for (of,) in mars["batches"][0]]
    weights = np.exp(np.negative(np.concatenate(ratios)))
    # Of p / m at each position; where m is p it is 1.
    error = weights.std() / math.sqrt(len(weights))
    assert (weights != 1).mean() > 0.1
    assert abs(weights.mean() - 1) < 3 * error


@pytest.mark.nightly
@pytest.mark.parametrize("name", DRAFTERS)
def test_price_0_is_vllm_where_drafts_are_cut(models, name):
    target, given, own = drafter(models, name)
    given["enable_adaptive_verification"] = True
    engine = {"v2": True, "model": target, "max_num_seqs": 8, "costs": COSTS}
    requests = {
        f"{'sampled' if i % 2 else 'greedy'} {i}": (
            workload.prompt(i),
            workload.sampled(i, max_tokens=24) if i % 2 else workload.greedy(max_tokens=24),
        )
        for i in range(8)
    }
    asked = [list(requests.values())]
    theirs = workload.run({**given, **own}, asked, **engine)
    mars = workload.run({**given, **workload.STRICT_PRICE}, asked, **engine)
    workload.assert_same_batches([requests], theirs, mars, but=BY_BLOCKS)
    drafted = mars["metrics"][-1]["vllm:spec_decode_num_draft_tokens"]
    assert 0 < sum(of["admitted"] for of in mars["rounds"]) < drafted
    if not BY_BLOCKS:
        assert mars["rounds"] == theirs["rounds"]
