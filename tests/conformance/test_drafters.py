"""Current drafters in V2 engines, whose kernels run in the interpreter."""

import math

import numpy as np
import pytest

import tiny_models
import workload
from test_adaptive import COSTS, assert_same

pytestmark = pytest.mark.engine
PROBABILISTIC = {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}
FIXED = {"rejection_sample_method": "standard"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("drafters")
    model = tiny_models.llama(directory / "target", added=0.005)
    for kind in ("dflash", "dflash2", "dspark"):
        tiny_models.dflash(directory / kind, model, kind)
    tiny_models.mimo(directory / "mimo")
    return directory


DRAFTERS = {
    "dspark": ("target", {"method": "dspark", "model": "dspark"}, PROBABILISTIC),
    "dflash2": ("target", {"method": "dflash", "model": "dflash2"}, PROBABILISTIC),
    "dflash": ("target", {"method": "dflash", "model": "dflash"}, FIXED),
    "mtp": ("mimo", {"method": "mtp"}, PROBABILISTIC),
}


def drafter(models, name):
    """The target, its drafts, and vLLM's options to verify them."""
    target, draft, verification = DRAFTERS[name]
    speculation = {"num_speculative_tokens": 3 if "model" in draft else 1, **draft}
    if "model" in draft:
        speculation["model"] = str(models / draft["model"])
    return str(models / target), speculation, verification


def alternating(count, max_tokens):
    return {
        f"{'sampled' if i % 2 else 'greedy'} {i}": (
            workload.prompt(i),
            workload.sampled(i, max_tokens=max_tokens)
            if i % 2
            else workload.greedy(max_tokens=max_tokens),
        )
        for i in range(count)
    }


def nightly(*arguments):
    return pytest.param(*arguments, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("name", "is_cut"),
    [
        ("dspark", False),
        *(nightly(name, False) for name in ("dflash2", "dflash", "mtp")),
        *(nightly(name, True) for name in DRAFTERS),
    ],
)
def test_price_0_is_vllm(models, name, is_cut):
    """Also if adaptive verification cuts the drafts."""
    target, speculation, verification = drafter(models, name)
    engine = {"v2": True, "model": target, "max_num_seqs": 8}
    requests = alternating(4, 16)
    if is_cut:
        speculation["enable_adaptive_verification"] = True
        engine["costs"] = COSTS
        requests = alternating(8, 24)
    batches = [list(requests.values())]
    vllms = workload.run({**speculation, **verification}, batches, **engine)
    mars = workload.run({**speculation, **workload.STRICT_PRICE}, batches, **engine)
    is_probabilistic = verification is PROBABILISTIC
    assert ("Drafts are probabilistic" if is_probabilistic else "Drafts are fixed.") in mars["log"]
    assert mars["has_draft_logits"] == is_probabilistic
    if is_cut:
        assert_same([requests], vllms, mars)
    else:
        workload.assert_same_batches([requests], vllms, mars, but=workload.BY_BLOCKS)


@pytest.mark.nightly
@pytest.mark.parametrize("name", DRAFTERS)
def test_weights_are_exact(models, name):
    """p / m averages 1 over the positions of answers."""
    target, speculation, _ = drafter(models, name)
    rule = {"rejection_sample_method": "mars", "mars_price": 1.0, "mars_strict_opening": 0}
    sampling = workload.sampled(None, max_tokens=48, extra_args={"mars_return": True})
    requests = [(workload.prompt(i), {**sampling, "seed": i}) for i in range(8)]
    engine = {"v2": True, "model": target, "max_num_seqs": 8}
    mars = workload.run({**speculation, **rule}, [requests], **engine)
    ratios = [answer["returned"]["log_ratios"] for (answer,) in mars["batches"][0]]
    weights = np.exp(np.negative(np.concatenate(ratios)))
    error = weights.std() / math.sqrt(len(weights))
    assert (weights != 1).mean() > 0.1
    assert abs(weights.mean() - 1) < 3 * error
