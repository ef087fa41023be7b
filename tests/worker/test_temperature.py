"""The kernels divide logits by the temperature if a batch needs no other logits processing."""

import itertools
from types import SimpleNamespace

import pytest
import torch

# vLLM's CPU worker must replace pinned memory and streams before V2 modules import them.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip
from vllm import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu.sample.sampler import Sampler

from benchmarks.step_v2 import Shape, step_of, tokens_of, vllm_config
from vllm_mars import MarsConfig

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow)"),
]

BATCH, K, VOCAB = 8, 3, 1_000
TEMPERATURES = (0.7, 0.0, 1.3, 1.0)
STRICT, LOSSY = MarsConfig(price=0), MarsConfig(max_loss=0.5, strict_opening=0)


def made(is_probabilistic, sampling_params, dtype=torch.bfloat16):
    shape = Shape(0.7, is_probabilistic, BATCH, K, VOCAB)
    step = step_of(shape, torch.device("cpu"), sampling_params)
    step.logits = step.logits.to(dtype)
    # A grammar has masked a row.
    step.logits[3, 9:] = -torch.inf
    return step


def params(**options):
    temperatures = itertools.islice(itertools.cycle(TEMPERATURES), BATCH)
    return [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=900, **options)
        for seed, temperature in enumerate(temperatures)
    ]


@pytest.fixture
def processed(monkeypatch):
    """Calls of `apply_sampling_params`, which copies the logits."""
    calls, apply = [], Sampler.apply_sampling_params

    def recorded(*args):
        calls.append(args)
        return apply(*args)

    monkeypatch.setattr(Sampler, "apply_sampling_params", recorded)
    return calls


@pytest.mark.parametrize(
    ("is_probabilistic", "dtype"),
    [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)],
)
def test_lossy_requests_get_the_tokens_of_divided_logits(processed, is_probabilistic, dtype):
    """float32 results are bit-identical; bfloat16 losses differ by rounding."""
    step, results = made(is_probabilistic, params(), dtype), []
    for apply_temperature in (True, False):
        verify = step.verification(LOSSY)
        verifier = verify.func.__self__
        assert verifier.apply_temperature
        verifier.apply_temperature = apply_temperature
        tokens, records = tokens_of(verify), verifier.requests.records
        results.append((tokens, records, verifier.reports.counters.device_counts))
        assert len(processed) == (not apply_temperature)
    (tokens, records, counts), (expected_tokens, expected_records, expected_counts) = results
    assert torch.equal(tokens, expected_tokens)
    assert records.lost.any()
    if dtype == torch.float32:
        assert torch.equal(records.table, expected_records.table)
        assert torch.equal(counts, expected_counts)
    else:
        assert torch.allclose(records.lost.float(), expected_records.lost.float(), rtol=1e-3)


def test_values_that_change_no_logits_need_no_processing(processed):
    """Values that vLLM's front end sets, and with which clients switch an option off."""
    front_end = SimpleNamespace(vllm_config=vllm_config())
    samplings = params(top_k=-1, logit_bias={}, allowed_token_ids=[], bad_words=[])
    for sampling in samplings:
        is_watermarked = InputProcessor.resolve_watermarking(front_end, sampling)
        InputProcessor.apply_watermarking(front_end, sampling, is_watermarked)
        sampling.update_from_generation_config({"eos_token_id": [3, 4]}, 2)
    tokens_of(made(False, samplings).verification(LOSSY))
    assert not processed
    for number, option in enumerate(({"top_k": 5}, {"thinking_token_budget": 0}), 1):
        tokens_of(made(False, params(**option)).verification(LOSSY))
        assert len(processed) == number


def test_a_third_partys_logits_processor_is_applied(processed):
    from vllm_mars import MarsRejectionSamplerV2

    class Other:
        """A logits processor."""

    step = made(False, params())
    verifier = step.verification(STRICT).func.__self__
    sampler = verifier.sampler

    def applies_temperature():
        return MarsRejectionSamplerV2(
            sampler,
            step.spec_config("standard"),
            torch.device("cpu"),
            verifier.engine_params,
            verifier.reports,
            verifier.requests,
        ).apply_temperature

    assert applies_temperature()
    sampler.logits_processors.append(Other())
    assert not applies_temperature()
    del sampler.logits_processors[-1]
    sampler.logprobs_mode = "processed_logprobs"
    assert not applies_temperature()
