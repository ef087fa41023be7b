"""Adaptive verification in V2 engines, whose kernels run in the interpreter."""

import pytest

import tiny_models
import workload

pytestmark = pytest.mark.engine
# Each further token costs a tenth of a step of one token, so many drafts are not worth verifying.
VERIFY_MS = [[size, 1 + (size - 1) / 10] for size in range(1, 129)]
COSTS = {"draft_ms": [[1, 0.5], [64, 0.5]], "verify_ms": VERIFY_MS}
RULES = {
    "block": {"rejection_sample_method": "block"},
    "strict": workload.STRICT_PRICE,
    "lossy": {"rejection_sample_method": "mars", "mars_max_loss": 0.02, "mars_strict_opening": 0},
}
# Without requests whose drafts MARS samples from another distribution than vLLM.
NAMES = "greedy", "greedy, logprobs", "sampled", "sampled, hot"
KINDS = {name: request for name, request in workload.every_kind(12).items() if name in NAMES}
LONG = {f"sampled {i}": (workload.prompt(i), workload.sampled(i, max_tokens=110)) for i in range(8)}


@pytest.fixture(scope="module")
def guessable(tmp_path_factory):
    """Folders of a target and of a draft model that guesses it well."""
    directory = tmp_path_factory.mktemp("guessable")
    model = tiny_models.llama(directory / "target", added=0.02)
    tiny_models.first_layer(directory / "draft", model)
    return directory


def answered(guessable, rule, batches):
    drafts = workload.draft_model(
        guessable / "draft", enable_adaptive_verification=True, **RULES[rule]
    )
    options = {"model": str(guessable / "target"), "max_num_seqs": 8, "costs": COSTS, "v2": True}
    return workload.run(drafts, [list(batch.values()) for batch in batches], **options)


def summed(intervals, name):
    return sum(interval[name] for interval in intervals)


def assert_same(batches, vllms, mars):
    workload.assert_same_batches(batches, vllms, mars, but=workload.BY_BLOCKS)
    drafted = mars["metrics"][-1]["vllm:spec_decode_num_draft_tokens"]
    assert (
        0 < summed(mars["intervals"], "observed") < summed(mars["intervals"], "admitted") < drafted
    )
    if not workload.BY_BLOCKS:
        assert mars["intervals"] == vllms["intervals"]


def test_price_0_is_vllm_with_the_same_number_of_drafts(guessable):
    assert_same([KINDS], *(answered(guessable, rule, [KINDS]) for rule in ("block", "strict")))


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_the_estimator_learns_the_acceptance_rate_of_mars(guessable):
    """At 0.02 nats per token it admits more drafts than strictly, in long answers."""
    batches, admitted = [KINDS, LONG], {}
    results = {rule: answered(guessable, rule, batches) for rule in RULES}
    assert_same(batches, results["block"], results["strict"])
    for rule in ("strict", "lossy"):
        intervals = results[rule]["intervals"]
        # The intervals after the first fits.
        fitted = intervals[2:]
        observed, accepted = (summed(fitted, name) for name in ("observed", "accepted"))
        share = accepted / observed
        error = (share * (1 - share) / observed) ** 0.5
        assert abs(summed(fitted, "predicted") / observed - share) < 3 * error
        admitted[rule] = summed(intervals, "admitted") / summed(intervals, "steps")
        print(rule, admitted, share, error, intervals)
    assert admitted["lossy"] > admitted["strict"]
