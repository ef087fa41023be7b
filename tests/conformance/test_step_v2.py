"""One verification step of Model Runner V2: vLLM's own sampler beside MARS."""

import gc
import math
import unittest.mock
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

import fuzz
import oracle
import steps_v2
from steps_v2 import Allocated, Request, Step, emitted, lost_by_ended, random_step
from vllm_mars import MarsConfig
from vllm_mars.kernels.accept import fused as accept_kernel
from vllm_mars.kernels.ledger.naive import loss_rate, most_lost
from vllm_mars.kernels.record import Column
from vllm_mars.kernels.verdicts import Verdict
from vllm_mars.releases import draws_anew
from vllm_mars.worker.draft_temperature import scale_v2
from vllm_mars.worker.requests_v2 import RequestsV2

pytestmark = pytest.mark.interpreted

STRICT = [MarsConfig(theta=1.0), MarsConfig(price=0.0)]


@pytest.fixture(autouse=True)
def the_seeds_of_vllm(monkeypatch):
    """vLLM 0.32 draws by position alone what its `block` compares with: its next step meets the
    same numbers again, and its output is off by that. With its seeds a step is the same."""
    if not draws_anew():
        monkeypatch.setattr(accept_kernel, "step_seed", lambda seed, place: seed)


LENGTHS = [3, 0, 5, 1, 2]


def params(temperature=0.0, seed=None, bad_words=None, **options):
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=50, **options)
    sampling._bad_words_token_ids = bad_words
    return sampling


def each(temperatures, **options):
    """The same parameters at several temperatures, each request with a seed of its own."""
    return [params(t, seed, **options) for seed, t in enumerate(temperatures, 1)]


GREEDY = [0.0] * 5
SAMPLED = [0.7, 1.0, 1.3, 0.2, 1.0]
MIXED = [0.0, 1.0, 0.8, 0.0, 1.2]
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


def assert_equal(own, mars):
    assert emitted(mars) == emitted(own)
    assert torch.equal(mars.num_sampled, own.num_sampled)
    assert torch.equal(mars.num_rejected, own.num_rejected)
    assert mars.sampled_token_ids.shape == own.sampled_token_ids.shape
    assert mars.sampled_token_ids.dtype == own.sampled_token_ids.dtype
    assert (own.logprobs_tensors is None) == (mars.logprobs_tensors is None)
    if own.logprobs_tensors is not None:
        for field in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
            one, other = (getattr(o.logprobs_tensors, field) for o in (own, mars))
            assert torch.equal(one, other), field
        assert (
            own.logprobs_tensors.cu_num_generated_tokens
            == mars.logprobs_tensors.cu_num_generated_tokens
        )


def by_day(is_by_day):
    return [] if is_by_day else pytest.mark.nightly


@pytest.mark.parametrize(
    ("setting", "with_draft_logits"),
    [
        # By day every second setting has draft probabilities, and the others have none.
        pytest.param(setting, with_draft_logits, marks=by_day(number % 2 == with_draft_logits))
        for number, setting in enumerate(SETTINGS)
        for with_draft_logits in (False, True)
    ],
)
def test_theta_1_is_vllm(setting, with_draft_logits):
    step = random_step(1, SETTINGS[setting], LENGTHS, with_draft_logits=with_draft_logits)
    # The drafts of a request that has sampled nothing since its prefill are placeholders.
    step.requests[4].prefill_len = len(step.requests[4].tokens)
    modes = ["raw_logprobs", "processed_logprobs"] if "logprob" in setting else ["raw_logprobs"]
    for mode in modes:
        own = step.run(None, logprobs_mode=mode)
        assert_equal(own, step.run(STRICT[with_draft_logits], logprobs_mode=mode))
    assert max(map(len, emitted(own))) > 1, "no draft was accepted, so little was compared"


@pytest.mark.parametrize("max_chunk_bytes", [2**30, 97 * 4 * 8])
def test_each_request_gets_the_logprobs_that_it_asks_for(monkeypatch, max_chunk_bytes):
    """Top ones or those of named tokens, which vLLM's own leaves out; log m wherever a token is."""
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", max_chunk_bytes)
    asked = ({"logprobs": 2}, {"logprob_token_ids": [5, 7, 9]}, {}, {"logprobs": 0})
    samplings = [params(t, 3, **asked[i % 4]) for i, t in enumerate(MIXED)]
    step = random_step(1, samplings, LENGTHS, ranks=(0, 1, 2))
    output = step.run(
        MarsConfig(price=2.0, strict_opening=0, logprobs="sampled"),
        logprobs_mode="processed_logprobs",
    )
    found, ratios = output.logprobs_tensors, []
    rows = [sum(LENGTHS[:i]) + i for i in range(len(LENGTHS))]
    for request, begin, tokens in zip(step.requests, rows, emitted(output), strict=True):
        own = request.sampling
        for row, token in enumerate(tokens, begin):
            expected = (step.logits[row] / (own.temperature or 1.0)).log_softmax(-1)
            named = own.logprob_token_ids or expected.topk(own.logprobs or 0).indices.tolist()
            ids = found.logprob_token_ids[row, : 1 + len(named)]
            assert ids.tolist() == [token, *named]
            excess = found.logprobs[row, : 1 + len(named)] - expected[ids]
            ratios.append(excess[0])
            torch.testing.assert_close(excess, (ids == token) * excess[0], atol=1e-5, rtol=0)
    assert max(map(abs, ratios)) > 0.1


def test_the_device_says_where_logprobs_are_of_drafts_that_are_cut():
    """The host knows the lengths before the cut."""
    asked = ({"logprobs": 2}, {"logprob_token_ids": [5, 7, 9]})
    samplings = [params(t, 3, **asked[i % 2]) for i, t in enumerate(MIXED)]
    step = random_step(1, samplings, LENGTHS)
    found = []
    for is_cut in (False, True):
        sampler, batch = step.sampler(MarsConfig(price=2.0, strict_opening=0)), step.batch()
        if is_cut:
            sampler.enable_adaptive_verification = True
            batch.cu_num_logits_np = (1 + max(LENGTHS)) * np.arange(len(LENGTHS) + 1)
        tensors = sampler(step.logits.clone(), batch).logprobs_tensors
        places = tensors.cu_num_generated_tokens
        if is_cut:
            places = tensors.cu_num_generated_tokens_tensor.tolist()
        found.append((places, tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("vocab", [1500, pytest.param(9000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("temperatures", [pytest.param(GREEDY, marks=pytest.mark.nightly), MIXED])
def test_theta_1_is_vllm_over_several_blocks(temperatures, vocab):
    """vLLM resamples in blocks of 1,024 tokens, and takes maxima over blocks of 8,192."""
    step = random_step(1, each(temperatures), LENGTHS, vocab=vocab, with_draft_logits=True)
    assert_equal(step.run(None), step.run(MarsConfig(theta=1.0)))


def test_a_prefill_that_is_not_done_emits_nothing():
    tokens = list(range(20))
    requests = [Request(params(), [4, 5]), Request(params(1.0, 1), [], tokens, prefill_len=20)]
    step = Step(requests, torch.randn(4, 97), steps=2)
    for config in (None, MarsConfig(theta=1.0), MarsConfig(theta=0.5)):
        batch = step.batch()
        batch.seq_lens[1] = 10
        output = step.sampler(config)(step.logits.clone(), batch)
        assert output.num_sampled[0] > 0
        assert output.num_sampled[1] == output.num_rejected[1] == 0


def test_no_relaxed_token_repeats_more_of_the_answer_than_the_first_choice():
    """A prompt may be copied."""
    prompt = np.random.default_rng(0).integers(0, 3, 30).tolist()
    relaxed = repeated = 0
    for seed in range(12):
        step = random_step(seed, each(GREEDY), LENGTHS, vocab=3, ranks=(0, 1, 1))
        rng = np.random.default_rng(seed)
        for request in step.requests:
            answer = rng.integers(0, 3, rng.integers(1, 24)).tolist()
            request.tokens, request.prompt_len = prompt + answer, len(prompt)
        output = step.run(MarsConfig(price=1000.0, strict_opening=0))
        expected, row = [], 0
        for request in step.requests:
            answer = request.tokens[len(prompt) :]
            *rows, last = step.logits[row : row + len(request.drafts) + 1].tolist()
            row += len(rows) + 1
            given = rows, request.drafts, oracle.argmax(last)
            blocked = []
            for at, (draft, own) in enumerate(zip(request.drafts, rows, strict=True)):
                before = [*answer, *request.drafts[:at]]
                first = oracle.repeats(before, oracle.argmax(own))
                blocked.append(Verdict.REPEAT * (oracle.repeats(before, draft) > first))
            verified = oracle.verify(*given, price=1000.0, blocked=blocked)
            expected.append(verified.tokens)
            relaxed += verified.relaxed
            repeated += verified.tokens != oracle.verify(*given, price=1000.0).tokens
        assert emitted(output) == expected
    assert relaxed > 0
    assert repeated > 0


@pytest.mark.parametrize("config", [MarsConfig(theta=1.0), MarsConfig(theta=0.6)])
@pytest.mark.parametrize("setting", ["greedy", "mixed logprobs"])
def test_chunks_change_nothing(monkeypatch, setting, config):
    """Chunks hold whole requests, so a limit below a request's rows still takes them together."""
    step = random_step(2, SETTINGS[setting], LENGTHS, with_draft_logits=True)
    whole = step.run(config)
    for limit, chunks in ((1, 5), (5, 3), (11, 2)):
        monkeypatch.setattr(rejection_sampler, "get_max_chunk_logits", lambda _, n=limit: n)
        sampler = step.sampler(config)
        verify = unittest.mock.Mock(wraps=sampler._verify)
        monkeypatch.setattr(sampler, "_verify", verify)
        output = sampler(step.logits.clone(), step.batch(), step.draft_logits)
        assert verify.call_count == chunks
        assert_equal(whole, output)


@pytest.mark.parametrize("temperatures", [GREEDY, MIXED])
@pytest.mark.parametrize("with_draft_logits", [False, True])
def test_invalid_drafts(temperatures, with_draft_logits):
    """What no grammar has looked at: as vLLM at theta 1, and accepted at no theta."""
    for seed in range(3):
        step = random_step(seed, each(temperatures), LENGTHS, with_draft_logits=with_draft_logits)
        invalid = torch.rand(len(step.logits), generator=torch.Generator().manual_seed(seed)) < 0.4
        own = step.run(None, invalid_drafts=invalid)
        mars = step.run(MarsConfig(theta=1.0), invalid_drafts=invalid)
        assert_equal(own, mars)
        relaxed = step.run(MarsConfig(theta=0.01), invalid_drafts=invalid)
        row = 0
        for request, tokens in zip(step.requests, emitted(relaxed), strict=True):
            count = len(request.drafts)
            bad = invalid[row + 1 : row + 1 + count].tolist()
            assert len(tokens) - 1 <= (bad.index(True) if True in bad else count)
            row += count + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_was_lost_is_kept_by_slot(temperature):
    """A new request, one with a bound of its own, and one that comes back after two tokens."""
    logits = torch.tensor([[1.5, 2.0, 0.5, 0.0], [0.0, 3.0, 0.0, 0.0]])
    tokens = [3, 1, 2, 1]
    requests = [
        Request(params(), [0], tokens, prefill_len=3),
        Request(params(extra_args={"mars_max_loss": 0.125}), [0], tokens, prefill_len=3),
        Request(params(temperature, 1), [0], [*tokens, 1], prefill_len=5),
    ]
    step = Step(requests, logits.repeat(3, 1))
    sampler = step.sampler(MarsConfig(theta=0.5, max_loss=0.25, strict_opening=0))
    batch = step.batch()

    def lost():
        return sampler.requests.records.lost[batch.idx_mapping].tolist()

    before = lost()
    rates = sampler.requests.records.rate[batch.idx_mapping].tolist()
    assert rates == [2**28, 2**27, 2**28]
    assert before == [0, 0, 102 * 2**14]
    for number in (1, 2):
        output = sampler(step.logits.clone(), batch, step.draft_logits, None)
        # Half a nat each. What the last one has earned since it came back is a quarter.
        assert [tokens[0] for tokens in emitted(output)[:2]] == [0, 0]
        assert lost() == [number * 2**15] * 2 + before[2:]


def test_drafts_are_drawn_at_a_share_of_what_their_slots_request_has_now():
    """vLLM hands the device another buffer of temperatures each time that a request comes."""
    config = MarsConfig(price=0.1, draft_temperature=0.5)
    step = Step([Request(params(), [0])], torch.zeros(2, 9), torch.zeros(1, 1, 9))
    sampler, batch, seen = step.sampler(config), step.batch(), []
    speculator = SimpleNamespace(
        draft_logits=torch.empty(1),
        propose=lambda input_batch, temperature, seeds: seen.append((temperature.clone(), seeds)),
    )
    states = sampler.requests._req_states
    runner = SimpleNamespace(speculator=speculator, sampler=sampler.sampler, req_states=states)
    with Allocated() as loaded:
        scale_v2(runner, config, sampler.requests)
    states, name = sampler.requests._req_states, "another"
    states.free_indices = [0]
    for temperature in (0.5, 1.0, 0.25):
        states.add_request(name, 1, [3], 0, 50)
        slot = states.remove_request(name)
        sampler.sampler.add_request(slot, params(temperature))
        sampler.sampler.apply_staged_writes()
        batch.idx_mapping_np[0] = slot
        sampling = sampler.sampler.sampling_states
        speculator.propose(batch, sampling.temperature.gpu, sampling.seeds.gpu)
        loaded.throw_away()
        assert seen[-1][0][slot] == temperature / 2


@pytest.mark.skipif(draws_anew(), reason="vLLM sees to it itself")
@pytest.mark.parametrize("draft_temperature", [None, 1.0])
def test_a_draft_is_drawn_with_other_numbers_in_each_step(draft_temperature):
    """Verified by blocks, what stays depends on the numbers of all positions.

    A step without a draft, after which the same numbers may come again, verifies none.
    """
    config = MarsConfig(price=0.1, draft_temperature=draft_temperature)
    step = Step([Request(params(1.0, 7), [0])], torch.zeros(2, 9), torch.zeros(1, 1, 9))
    sampler, batch, seen, verified = step.sampler(config), step.batch(), [], []
    speculator = SimpleNamespace(
        draft_logits=torch.empty(1),
        propose=lambda input_batch, temperature, seeds: seen.append(seeds[step.states].tolist()),
    )
    states, sampling = sampler.requests._req_states, sampler.sampler.sampling_states
    runner = SimpleNamespace(speculator=speculator, sampler=sampler.sampler, req_states=states)
    scale_v2(runner, config, sampler.requests)
    for is_verified in (True, False, True, True):
        given = {"temperature": sampling.temperature.gpu, "seeds": sampling.seeds.gpu}
        speculator.propose(batch, **given)
        num_emitted = torch.ones(1, dtype=torch.int32)
        if is_verified:
            verified += seen[-1]
            num_emitted = sampler(step.logits.clone(), batch, step.draft_logits).num_sampled
        states.total_len.gpu[step.states] += num_emitted
    assert len({*verified}) == 3
    assert sampling.seeds.gpu[step.states].tolist() == [7]


@pytest.mark.parametrize("owner", ["speculator", "RequestState"])
def test_what_vllm_no_longer_says_is_missed_aloud(owner):
    step = Step([Request(params(), [0])], torch.zeros(2, 9))
    sampler = step.sampler(MarsConfig(price=0.1))
    if owner == "speculator":
        runner = SimpleNamespace(speculator=object(), sampler=sampler.sampler)
        with pytest.raises(RuntimeError, match="object has no draft_logits, by which"):
            scale_v2(runner, MarsConfig(price=0.1), sampler.requests)
        return
    # A dummy run is of a slot that holds no request.
    sampler.sampler.add_request(0, params())
    slot = int(step.states[0])
    with pytest.raises(RuntimeError, match=f"Request '{slot}' is in slot {slot}, but RequestState"):
        sampler.sampler.add_request(slot, params())


@pytest.mark.parametrize("price", [0.0, 0.5])
@pytest.mark.parametrize("with_draft_logits", [False, True])
def test_a_seed_repeats_what_is_drawn(price, with_draft_logits):
    """Whatever the others of the batch draw. Drafts are drawn by seed and position alone."""

    def run(*seeds):
        sampling = [params(t, seed) for t, seed in zip(SAMPLED, seeds, strict=True)]
        step = random_step(3, sampling, LENGTHS, with_draft_logits=with_draft_logits)
        return emitted(step.run(MarsConfig(price=price, strict_opening=0)))

    once = run(1, 2, 3, 4, 5)
    assert run(1, 2, 3, 4, 5) == once
    other = run(1, 9, 8, 7, 6)
    assert other[0] == once[0] and other[1:] != once[1:]


@pytest.mark.parametrize("back", [0, 400])
@pytest.mark.parametrize("before", [[], [5, 8, 80, 8]])
@pytest.mark.parametrize("answered", [0, 1])
def test_what_a_prompt_has_opened_stays_open(back, before, answered):
    """Of a request that comes, and of one that comes back with what it has answered."""
    config = MarsConfig(theta=0.01, strict_spans=((90, 91),), strict_opening=0, turns=(80,))
    step = random_step(3, each(GREEDY), LENGTHS, ranks=(0, 1, 1))
    strict = emitted(step.run(None))

    def tokens(*last):
        for request in step.requests:
            prompt = [*before, 90, 7, *[8] * back, *last]
            request.prompt_len, request.tokens = len(prompt), [*prompt, 9, *[9] * answered]
        return emitted(step.run(config))

    # Over a special token that ends no message; closed; and in an earlier message.
    assert tokens(1, 8) == strict
    assert tokens(91, 8) != strict
    assert tokens(80, 8) != strict


@pytest.mark.parametrize("spans", [(), ((90, 91),)])
def test_nothing_is_left_of_what_sleep_throws_away(monkeypatch, spans):
    constraint = StructuredOutputsParams(regex="a")
    sampling = [*each(GREEDY[:4]), params(structured_outputs=constraint)]
    step = random_step(3, sampling, LENGTHS, ranks=(0, 1, 1))
    config = MarsConfig(theta=0.01, strict_spans=spans, max_loss=9.0, strict_opening=0)
    expected = emitted(step.run(config))
    assert expected != emitted(step.run(None))
    loaded = Allocated()

    def load(*args, **options):
        with loaded:
            return RequestsV2(*args, **options)

    monkeypatch.setattr(steps_v2, "RequestsV2", load)
    sampler = step.sampler(config)
    loaded.throw_away()
    assert emitted(sampler(step.logits.clone(), step.batch(), step.draft_logits)) == expected
    # Asleep, the engine preempts its requests; the runner hears of it when it is awake.
    requests, before = sampler.requests, sampler.requests.records.table.clone()
    loaded.throw_away()
    states = requests._req_states
    ids = {str(slot): slot for slot in step.states.tolist()}
    assert lost_by_ended(requests, [*ids], []) == (0, 0)
    for name, slot in ids.items():
        states.remove_request(name)
        states.free_indices = [slot]
        states.add_request(name, 2, [5, 7, 9, 1], 0, 50)
        sampler.sampler.add_request(slot, params(extra_args={"mars_max_loss": 0.5}))
    sampler.sampler.apply_staged_writes()
    slots = [*ids.values()]
    assert before[slots, Column.LOST].sum() > 0
    assert torch.equal(requests.records.lost[slots], before[slots, Column.LOST])


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_of_a_relaxed_token_are_its_own(mode, temperature):
    logits = torch.tensor([[1.9, 2.0, 0.5, 0.0], [0.0, 3.0, 0.0, 0.0]])
    step = Step([Request(params(temperature, 1, logprobs=2), [0], [3, 1, 2, 1])], logits)
    output = step.run(MarsConfig(theta=0.9), logprobs_mode=mode)
    assert emitted(output)[0][0] == 0
    scale = temperature if mode == "processed_logprobs" and temperature else 1.0
    expected = (logits[0] / scale).log_softmax(-1)
    tensors = output.logprobs_tensors
    assert tensors.logprob_token_ids[0].tolist() == [0, 1, 0]
    torch.testing.assert_close(tensors.logprobs[0], expected[torch.tensor([0, 1, 0])])
    assert tensors.selected_token_ranks[0] == 2


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
    samples_only = {"top_k", "top_p", "min_p"} & set(options)
    temperatures = [1.0] * 20 if samples_only else [0.0] * 4 + [1.0] * 16
    requests = [
        Request(params(temperature, seed, **options), [0], [3, 1, 2, 1])
        for seed, temperature in enumerate(temperatures)
    ]
    output = Step(requests, logits.repeat(20, 1)).run(MarsConfig(theta=0.01))
    assert all(tokens[0] != 0 for tokens in emitted(output))


def test_a_preempted_request_finds_what_it_has_lost():
    step = random_step(1, each(GREEDY), LENGTHS)
    sampler = step.sampler(MarsConfig(max_loss=0.02))
    requests, states = sampler.requests, sampler.requests._req_states
    name, slot = next(iter(states.req_id_to_index.items()))
    requests.records.lost[slot] = 777
    assert lost_by_ended(requests, [name], []) == (0, 0)
    states.remove_request(name)
    assert lost_by_ended(requests, [], [name]) == (1, 777)
    assert lost_by_ended(requests, [], [name]) == (0, 0)
    states.add_request(name, 3, [5, 7, 9], 0, 50)
    requests.records.lost[states.req_id_to_index[name]] = 777
    # A further input: vLLM takes the request out and adds it, and what it has lost is told once.
    states.remove_request(name)
    states.add_request(name, 4, [5, 7, 9, 1], 0, 50)
    assert lost_by_ended(requests, [], []) == (1, 777)
    requests.records.lost[states.req_id_to_index[name]] = 777

    def come_back(preempted, finished):
        lost_by_ended(requests, preempted, finished)
        states.remove_request(name)
        # With two output tokens, in whatever slot is free.
        states.add_request(name, 3, [5, 7, 9, 1, 2], 0, 50)
        slot = states.req_id_to_index[name]
        sampler.sampler.add_request(slot, params())
        states.apply_staged_writes()
        sampler.sampler.apply_staged_writes()
        return int(requests.records.lost[slot])

    assert come_back([name], []) == 777
    # Its end is forgotten, and of one that is not known all is taken to be lost.
    all_lost = most_lost(loss_rate(0.02), 2)
    assert come_back([name], [name]) == all_lost != 777


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_step_holds_no_more_memory_than_vllms(is_drawn):
    step = random_step(1, each(SAMPLED), LENGTHS, vocab=20_000, with_draft_logits=is_drawn)
    most = []
    for config in (None, MarsConfig(price=0.5, strict_opening=0)):
        sampler, given = step.sampler(config), (step.batch(), step.draft_logits, None)
        sampler(step.logits.clone(), *given)
        logits = step.logits.clone()
        # What is freed meanwhile would count as memory that the step gives back.
        gc.collect()
        with torch.profiler.profile(profile_memory=True) as profile:
            sampler(logits, *given)
        held = [0]
        events = profile.profiler.kineto_results.events()
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                held.append(held[-1] + event.nbytes())
        most.append(max(held))
    # A row in float32 has 80 kB.
    assert most[1] - most[0] < 60_000


@pytest.mark.parametrize("number", range(24))
def test_random_calls(number):
    assert fuzz.check_v2(np.random.default_rng([7, number])) is None


def test_steps_are_real():
    """The steps reach vLLM's kernels through Triton's interpreter."""
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    assert isinstance(rejection_sampler_utils._rejection_kernel, InterpretedFunction)
    assert steps_v2.RejectionSampler is rejection_sampler.RejectionSampler
