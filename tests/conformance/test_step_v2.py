"""Verification steps of Model Runner V2: vLLM's sampler against MARS."""

import gc
import math

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

import fuzz
import oracle
from benchmarks.step_v2 import Request, Step
from steps_v2 import GREEDY, LENGTHS, MIXED, SAMPLED, each, emitted, params, random_step
from vllm_mars import MarsConfig
from vllm_mars.kernels.accept import fused as accept_kernel
from vllm_mars.releases import draws_anew

pytestmark = pytest.mark.interpreted

STRICT = [MarsConfig(theta=1.0), MarsConfig(price=0.0)]


@pytest.fixture(autouse=True)
def vllms_seeds(monkeypatch):
    """Uses vLLM's seeds, so that steps are equal.

    vLLM 0.32's `block` derives random numbers from positions only, so the next step reuses them,
    which biases its output.
    """
    if not draws_anew():
        monkeypatch.setattr(accept_kernel, "step_seed", lambda seed, place: seed)


SETTINGS = {
    "greedy": each(GREEDY),
    "temperature 1": each([1.0] * 5),
    "sampled": each(SAMPLED),
    "mixed": each(MIXED),
    "top-k": [params(t, 7, top_k=k) for t, k in zip(SAMPLED, [2, 5, 97, 1, -1], strict=True)],
    "top-p": [params(t, 8, top_p=p) for t, p in zip(MIXED, [1.0, 0.5, 0.9, 1.0, 0.2], strict=True)],
    "top-k and top-p": each(SAMPLED, top_k=4, top_p=0.8),
    "min-p": [
        params(t, 9, min_p=p) for t, p in zip(SAMPLED, [0.02, 0.0, 0.1, 0.3, 0.05], strict=True)
    ],
    "penalties": each(MIXED, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4),
    "greedy penalties": each(GREEDY, repetition_penalty=1.5),
    "bad words": each(MIXED, bad_words=[[5], [7, 8], [5, 11]]),
    "allowed tokens": each(MIXED, allowed_token_ids=list(range(0, 97, 2))),
    "logit bias": each(MIXED, logit_bias={3: 6.0, 4: -100.0}),
    "min tokens": each(MIXED, min_tokens=20, stop_token_ids=list(range(0, 97, 3))),
    "greedy logprobs": each(GREEDY, logprobs=3),
    "mixed logprobs": each(MIXED, logprobs=2, top_p=0.9),
    "all logprobs": each(MIXED, logprobs=-1),
    "one logprob": [*each(MIXED[:4]), params(1.0, 5, logprobs=0)],
}


def assert_equal(vllms, mars):
    assert emitted(mars) == emitted(vllms)
    assert torch.equal(mars.num_sampled, vllms.num_sampled)
    assert torch.equal(mars.num_rejected, vllms.num_rejected)
    assert mars.sampled_token_ids.shape == vllms.sampled_token_ids.shape
    assert mars.sampled_token_ids.dtype == vllms.sampled_token_ids.dtype
    assert (vllms.logprobs_tensors is None) == (mars.logprobs_tensors is None)
    if vllms.logprobs_tensors is not None:
        for field in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
            expected = getattr(vllms.logprobs_tensors, field)
            assert torch.equal(getattr(mars.logprobs_tensors, field), expected), field
        assert (
            vllms.logprobs_tensors.cu_num_generated_tokens
            == mars.logprobs_tensors.cu_num_generated_tokens
        )


@pytest.mark.parametrize(
    ("setting", "with_draft_logits"),
    [
        # Daily runs alternate between settings with and without draft probabilities.
        pytest.param(
            setting,
            with_draft_logits,
            marks=[] if number % 2 == with_draft_logits else pytest.mark.nightly,
        )
        for number, setting in enumerate(SETTINGS)
        for with_draft_logits in (False, True)
    ],
)
def test_theta_1_is_vllm(setting, with_draft_logits):
    step = random_step(1, SETTINGS[setting], LENGTHS, with_draft_logits=with_draft_logits)
    # A request without output since its prefill has placeholder drafts.
    step.requests[4].prefill_len = len(step.requests[4].tokens)
    modes = ["raw_logprobs", "processed_logprobs"] if "logprob" in setting else ["raw_logprobs"]
    for mode in modes:
        vllms = step.run(None, logprobs_mode=mode)
        assert_equal(vllms, step.run(STRICT[with_draft_logits], logprobs_mode=mode))
    assert max(map(len, emitted(vllms))) > 1, "no draft was accepted, so little was compared"


@pytest.mark.parametrize("max_chunk_bytes", [2**30, 97 * 4 * 8])
@pytest.mark.parametrize("is_served", [False, True])
def test_each_request_gets_its_logprobs(monkeypatch, max_chunk_bytes, is_served):
    """The top logprobs, or named tokens' (which vLLM omits), and the token's log p or log m."""
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", max_chunk_bytes)
    options = ({"logprobs": 2}, {"logprob_token_ids": [5, 7, 9]}, {}, {"logprobs": 0})
    samplings = [params(t, 3, **options[i % 4]) for i, t in enumerate(MIXED)]
    step = random_step(1, samplings, LENGTHS, ranks=(0, 1, 2))
    output = step.run(
        MarsConfig(price=2.0, strict_opening=0, logprobs="sampled" if is_served else "target"),
        logprobs_mode="processed_logprobs",
    )
    tensors, ratios = output.logprobs_tensors, []
    rows = [sum(LENGTHS[:i]) + i for i in range(len(LENGTHS))]
    for request, begin, tokens in zip(step.requests, rows, emitted(output), strict=True):
        sampling = request.sampling
        for row, token in enumerate(tokens, begin):
            expected = (step.logits[row] / (sampling.temperature or 1.0)).log_softmax(-1)
            named = (
                sampling.logprob_token_ids or expected.topk(sampling.logprobs or 0).indices.tolist()
            )
            ids = tensors.logprob_token_ids[row, : 1 + len(named)]
            assert ids.tolist() == [token, *named]
            rank = (expected > expected[token]).sum() + 1
            assert tensors.selected_token_ranks[row] == rank
            excess = tensors.logprobs[row, : 1 + len(named)] - expected[ids]
            ratios.append(excess[0])
            torch.testing.assert_close(excess, (ids == token) * excess[0], atol=1e-5, rtol=0)
    assert max(map(abs, ratios)) > 0.1 if is_served else max(map(abs, ratios)) < 1e-5


def test_logprobs_of_cut_drafts_are_indexed_on_the_device():
    """The host only knows the lengths before the cut."""
    options = ({"logprobs": 2}, {"logprob_token_ids": [5, 7, 9]})
    samplings = [params(t, 3, **options[i % 2]) for i, t in enumerate(MIXED)]
    step = random_step(1, samplings, LENGTHS)
    results = []
    for is_cut in (False, True):
        sampler, batch = step.sampler(MarsConfig(price=2.0, strict_opening=0)), step.batch()
        if is_cut:
            sampler.enable_adaptive_verification = True
            batch.cu_num_logits_np = (1 + max(LENGTHS)) * np.arange(len(LENGTHS) + 1)
        tensors = sampler(step.logits.clone(), batch).logprobs_tensors
        indices = tensors.cu_num_generated_tokens
        if is_cut:
            indices = tensors.cu_num_generated_tokens_tensor.tolist()
        results.append((indices, tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("vocab", [1500, pytest.param(9000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("temperatures", [pytest.param(GREEDY, marks=pytest.mark.nightly), MIXED])
def test_theta_1_is_vllm_over_several_blocks(temperatures, vocab):
    """vLLM resamples in blocks of 1,024 tokens, and computes maxima over blocks of 8,192."""
    step = random_step(1, each(temperatures), LENGTHS, vocab=vocab, with_draft_logits=True)
    assert_equal(step.run(None), step.run(MarsConfig(theta=1.0)))


def test_an_unfinished_prefill_emits_nothing():
    tokens = list(range(20))
    requests = [Request(params(), [4, 5]), Request(params(1.0, 1), [], tokens, prefill_len=20)]
    step = Step(requests, torch.randn(4, 97), steps=2)
    for config in (None, MarsConfig(theta=1.0), MarsConfig(theta=0.5)):
        batch = step.batch()
        batch.seq_lens[1] = 10
        output = step.sampler(config)(step.logits.clone(), batch)
        assert output.num_sampled[0] > 0
        assert output.num_sampled[1] == output.num_rejected[1] == 0


@pytest.mark.parametrize("config", [MarsConfig(theta=1.0), MarsConfig(theta=0.6)])
@pytest.mark.parametrize("setting", ["greedy", "mixed logprobs"])
def test_chunks_change_nothing(monkeypatch, setting, config):
    """A chunk holds whole requests, even if the limit is smaller."""
    step = random_step(2, SETTINGS[setting], LENGTHS, with_draft_logits=True)
    whole = step.run(config)
    for limit in (1, 5, 11):
        monkeypatch.setattr(rejection_sampler, "get_max_chunk_logits", lambda _, n=limit: n)
        assert_equal(whole, step.run(config))


@pytest.mark.parametrize("temperatures", [GREEDY, MIXED])
@pytest.mark.parametrize("with_draft_logits", [False, True])
def test_invalid_drafts_are_rejected(temperatures, with_draft_logits):
    """Theta 1 verifies as vLLM does; the fuzz compares other values with the oracle."""
    for seed in range(3):
        step = random_step(seed, each(temperatures), LENGTHS, with_draft_logits=with_draft_logits)
        invalid = torch.rand(len(step.logits), generator=torch.Generator().manual_seed(seed)) < 0.4
        vllms = step.run(None, invalid_drafts=invalid)
        mars = step.run(MarsConfig(theta=1.0), invalid_drafts=invalid)
        assert_equal(vllms, mars)


@pytest.mark.parametrize("price", [0.0, 0.5])
@pytest.mark.parametrize("with_draft_logits", [False, True])
def test_a_seed_repeats_its_tokens(price, with_draft_logits):
    """Regardless of the other requests' seeds."""

    def run(*seeds):
        sampling = [params(t, seed) for t, seed in zip(SAMPLED, seeds, strict=True)]
        step = random_step(3, sampling, LENGTHS, with_draft_logits=with_draft_logits)
        return emitted(step.run(MarsConfig(price=price, strict_opening=0)))

    once = run(1, 2, 3, 4, 5)
    assert run(1, 2, 3, 4, 5) == once
    other = run(1, 9, 8, 7, 6)
    assert other[0] == once[0] and other[1:] != once[1:]


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words": [[0]]},
        {"allowed_token_ids": [1, 2]},
        {"logit_bias": {0: -math.inf}},
        {"min_tokens": 9, "stop_token_ids": [0]},
        {"top_k": 1},
        {"top_p": 0.3},
        {"min_p": 0.995},
    ],
)
def test_a_forbidden_draft_is_never_accepted(options):
    logits = torch.tensor([[1.99, 2.0, 1.0, 0.9], [0.0, 3.0, 0.0, 0.0]])
    sampled_only = {"top_k", "top_p", "min_p"} & set(options)
    temperatures = [1.0] * 20 if sampled_only else [0.0] * 4 + [1.0] * 16
    requests = [
        Request(params(temperature, seed, **options), [0], [3, 1, 2, 1])
        for seed, temperature in enumerate(temperatures)
    ]
    output = Step(requests, logits.repeat(20, 1)).run(MarsConfig(theta=0.01))
    assert all(tokens[0] != 0 for tokens in emitted(output))


@pytest.mark.parametrize("is_probabilistic", [False, True])
def test_a_step_allocates_no_more_memory_than_vllms(is_probabilistic):
    step = random_step(1, each(SAMPLED), LENGTHS, vocab=20_000, with_draft_logits=is_probabilistic)
    peaks = []
    for config in (None, MarsConfig(price=0.5, strict_opening=0)):
        sampler, inputs = step.sampler(config), (step.batch(), step.draft_logits, None)
        sampler(step.logits.clone(), *inputs)
        logits = step.logits.clone()
        # Memory that is freed meanwhile would count as freed by the step.
        gc.collect()
        with torch.profiler.profile(profile_memory=True) as profile:
            sampler(logits, *inputs)
        allocated = [0]
        events = profile.profiler.kineto_results.events()
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                allocated.append(allocated[-1] + event.nbytes())
        peaks.append(max(allocated))
    # A float32 row takes 80 kB.
    assert peaks[1] - peaks[0] < 60_000


@pytest.mark.parametrize("number", range(24))
def test_random_steps_equal_the_oracle(number):
    assert fuzz.check(np.random.default_rng([7, number])) is None


@pytest.mark.parametrize("function", ["is_relaxed", "repeats"])
def test_the_comparison_detects_a_wrong_rule(monkeypatch, function):
    monkeypatch.setattr(oracle, function, lambda *_: False)
    assert any(fuzz.check(np.random.default_rng([7, number])) for number in range(24))
