"""Adaptive verification in real engines on Model Runner V2, whose kernels the interpreter runs."""

import pytest

import tiny_models
import workload
from vllm_mars.releases import draws_anew

pytestmark = pytest.mark.engine
# What vLLM 0.32's `block` meets again in its next step, later ones and MARS do not.
BY_BLOCKS = () if draws_anew() else ("sampled",)
# A token more to verify costs a tenth of a step of one token: many drafts are not worth it.
VERIFY_MS = [[size, 1 + (size - 1) / 10] for size in range(1, 129)]
COSTS = {"draft_ms": [[1, 0.5], [64, 0.5]], "verify_ms": VERIFY_MS}
RULES = {
    "block": {"rejection_sample_method": "block"},
    "strict": workload.STRICT_PRICE,
    "lossy": {"rejection_sample_method": "mars", "mars_max_loss": 0.02, "mars_strict_opening": 0},
}
# None of the requests whose drafts vLLM samples from another distribution.
NAMES = "greedy", "greedy, logprobs", "sampled", "sampled, hot"
KINDS = {name: of for name, of in workload.every_kind(12).items() if name in NAMES}
LONG = {f"sampled {i}": (workload.prompt(i), workload.sampled(i, max_tokens=110)) for i in range(8)}


@pytest.fixture(scope="module")
def guessable(tmp_path_factory):
    """A target, and a draft that guesses it well."""
    directory = tmp_path_factory.mktemp("guessable")
    model = tiny_models.llama(directory / "target", added=0.02)
    tiny_models.first_layer(directory / "draft", model)
    return directory


def answered(guessable, rule, batches):
    """What an engine answers by a rule."""
    drafts = workload.draft_model(guessable, enable_adaptive_verification=True, **RULES[rule])
    options = {"model": str(guessable / "target"), "max_num_seqs": 8, "costs": COSTS, "v2": True}
    return workload.run(drafts, [list(batch.values()) for batch in batches], **options)


def summed(rounds, name):
    return sum(of[name] for of in rounds)


def assert_same(batches, own, mars):
    workload.assert_same_batches(batches, own, mars, but=BY_BLOCKS)
    drafted = mars["metrics"][-1]["vllm:spec_decode_num_draft_tokens"]
    assert 0 < summed(mars["rounds"], "observed") < summed(mars["rounds"], "admitted") < drafted
    if not BY_BLOCKS:
        assert mars["rounds"] == own["rounds"]


def test_price_0_is_vllm_under_the_same_budget(guessable):
    assert_same([KINDS], *(answered(guessable, rule, [KINDS]) for rule in ("block", "strict")))


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_the_estimator_learns_what_mars_accepts(guessable):
    """Of long answers, strictly and at 0.02 nats per token; there it admits more."""
    batches, admitted = [KINDS, LONG], {}
    found = {rule: answered(guessable, rule, batches) for rule in RULES}
    assert_same(batches, found["block"], found["strict"])
    for rule in ("strict", "lossy"):
        rounds = found[rule]["rounds"]
        # Once it has been fitted.
        learnt = rounds[2:]
        observed, accepted = (summed(learnt, name) for name in ("observed", "accepted"))
        share = accepted / observed
        error = (share * (1 - share) / observed) ** 0.5
        assert abs(summed(learnt, "predicted") / observed - share) < 3 * error
        admitted[rule] = summed(rounds, "admitted") / summed(rounds, "steps")
        print(rule, admitted, share, error, rounds)
    assert admitted["lossy"] > admitted["strict"]
