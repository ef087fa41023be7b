"""The kernels divide the logits by the temperature where that is all that a batch asks of them."""

import itertools

import pytest
import torch

# vLLM's CPU worker puts its stand-ins for pinned memory and streams in place, before the V2 modules
# take them.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler

from benchmarks.step_v2 import Shape, is_repeated, step_of, tokens_of
from vllm_mars import MarsConfig

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow)"),
]

BATCH, K, VOCAB = 8, 3, 1_000
TEMPERATURES = (0.7, 0.0, 1.3, 1.0)
STRICT, LOSSY = MarsConfig(price=0), MarsConfig(max_loss=0.5, strict_opening=0)


def made(is_probabilistic, own, dtype=torch.bfloat16):
    step = step_of(Shape(0.7, is_probabilistic, BATCH, K, VOCAB), torch.device("cpu"), own)
    step.logits = step.logits.to(dtype)
    # What a grammar leaves.
    step.logits[3, 9:] = -torch.inf
    return step


def params(**others):
    heat = itertools.cycle(TEMPERATURES)
    return [
        SamplingParams(temperature=next(heat), seed=i, max_tokens=900, **others)
        for i in range(BATCH)
    ]


@pytest.fixture
def processed(monkeypatch):
    """The calls of what copies the logits."""
    calls, apply = [], Sampler.apply_sampling_params

    def noted(*given):
        calls.append(given)
        return apply(*given)

    monkeypatch.setattr(Sampler, "apply_sampling_params", noted)
    return calls


@pytest.mark.parametrize("is_probabilistic", [False, True])
def test_strict_requests_get_vllms_tokens(processed, is_probabilistic):
    step = made(is_probabilistic, params())
    if not is_repeated(step):
        pytest.skip("vLLM 0.32 verifies drawn drafts with other numbers")
    expected = tokens_of(step.verification(step.strict_method))
    assert len(processed) == 1
    assert torch.equal(tokens_of(step.verification(STRICT)), expected)
    assert len(processed) == 1


@pytest.mark.parametrize("is_probabilistic", [False, True])
def test_lossy_requests_get_those_of_divided_logits(processed, is_probabilistic):
    """Bit for bit of float32, whose sums are made in one order."""
    step, found = made(is_probabilistic, params(), torch.float32), []
    for apply_temperature in (True, False):
        verify = step.verification(LOSSY)
        verifier = verify.func.__self__
        assert verifier.apply_temperature
        verifier.apply_temperature = apply_temperature
        tokens = tokens_of(verify)
        kept = verifier.requests.records.table, verifier.reports.counters.device_counts
        found.append((tokens, *kept))
        assert len(processed) == (not apply_temperature)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert verifier.requests.records.lost.any()


def test_of_16_bits_they_get_those_but_for_rounding(processed):
    step, lost = made(True, params()), []
    for apply_temperature in (True, False):
        verify = step.verification(LOSSY)
        verifier = verify.func.__self__
        verifier.apply_temperature = apply_temperature
        lost.append((tokens_of(verify), verifier.requests.records.lost.float()))
    assert torch.equal(lost[0][0], lost[1][0])
    assert torch.allclose(lost[0][1], lost[1][1], rtol=1e-3)


ASKED = {
    "top-p": {"top_p": 0.5},
    "min-p": {"min_p": 0.1},
    "a penalty": {"repetition_penalty": 1.2},
    "a bias": {"logit_bias": {3: -5.0}},
    "allowed tokens": {"allowed_token_ids": [1, 2, 3]},
    "no end yet": {"min_tokens": 800},
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_else_changes_the_logits_is_vllms(processed, asked):
    others = params()
    others[2] = params(**ASKED[asked])[2]
    step = made(False, others)
    expected = tokens_of(step.verification("standard"))
    assert torch.equal(tokens_of(step.verification(STRICT)), expected)
    assert len(processed) == 2


def test_a_processor_of_somebody_else_is_asked(processed):
    from vllm_mars import MarsRejectionSamplerV2

    class Other:
        """A logits processor."""

    step = made(False, params())
    verifier = step.verification(STRICT).func.__self__
    sampler = verifier.sampler
    own = sampler, step.spec_config("standard"), torch.device("cpu"), verifier.engine_params
    own = *own, verifier.reports, verifier.requests
    assert MarsRejectionSamplerV2(*own).apply_temperature
    sampler.logits_processors.append(Other())
    assert not MarsRejectionSamplerV2(*own).apply_temperature
    del sampler.logits_processors[-1]
    sampler.logprobs_mode = "processed_logprobs"
    assert not MarsRejectionSamplerV2(*own).apply_temperature
