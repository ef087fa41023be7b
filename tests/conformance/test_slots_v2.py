"""What Model Runner V2 keeps of a slot's request from step to step, on vLLM's real state."""

from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.step_v2 import Request, Step
from steps_v2 import GREEDY, LENGTHS, Allocated, each, emitted, lost_by_ended, params, random_step
from vllm_mars import MarsConfig
from vllm_mars.kernels.ledger.naive import loss_rate, most_lost
from vllm_mars.kernels.record import Column
from vllm_mars.releases import draws_anew
from vllm_mars.worker import requests_v2
from vllm_mars.worker.draft_sampling_v2 import wrap_speculator
from vllm_mars.worker.requests_v2 import RequestsV2

pytestmark = pytest.mark.interpreted
# Of a speculator that draws.
WITHOUT_GRAPHS = {
    "draft_logits": torch.empty(1),
    "draft_watermarker": None,
    "init_cudagraph_manager": None,
    "capture": None,
}


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
        **WITHOUT_GRAPHS,
        propose=lambda input_batch, temperature, seeds: seen.append((temperature.clone(), seeds)),
    )
    states = sampler.requests._req_states
    runner = SimpleNamespace(speculator=speculator, sampler=sampler.sampler, req_states=states)
    with Allocated() as loaded:
        wrap_speculator(runner, config, sampler.requests)
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
        **WITHOUT_GRAPHS,
        propose=lambda input_batch, temperature, seeds: seen.append(seeds[step.slots].tolist()),
    )
    states, sampling = sampler.requests._req_states, sampler.sampler.sampling_states
    runner = SimpleNamespace(speculator=speculator, sampler=sampler.sampler, req_states=states)
    wrap_speculator(runner, config, sampler.requests)
    for is_verified in (True, False, True, True):
        given = {"temperature": sampling.temperature.gpu, "seeds": sampling.seeds.gpu}
        speculator.propose(batch, **given)
        num_emitted = torch.ones(1, dtype=torch.int32)
        if is_verified:
            verified += seen[-1]
            num_emitted = sampler(step.logits.clone(), batch, step.draft_logits).num_sampled
        states.total_len.gpu[step.slots] += num_emitted
    assert len({*verified}) == 3
    assert sampling.seeds.gpu[step.slots].tolist() == [7]


@pytest.mark.parametrize("owner", ["speculator", "RequestState"])
def test_what_vllm_no_longer_says_is_missed_aloud(owner):
    step = Step([Request(params(), [0])], torch.zeros(2, 9))
    sampler = step.sampler(MarsConfig(price=0.1))
    if owner == "speculator":
        runner = SimpleNamespace(speculator=object(), sampler=sampler.sampler)
        with pytest.raises(RuntimeError, match="object has no draft_logits, by which"):
            wrap_speculator(runner, MarsConfig(price=0.1), sampler.requests)
        return
    # A dummy run is of a slot that holds no request.
    sampler.sampler.add_request(0, params())
    slot = int(step.slots[0])
    with pytest.raises(RuntimeError, match=f"Request '0' is in slot {slot}, but RequestState"):
        sampler.sampler.add_request(slot, params())


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

    monkeypatch.setattr(requests_v2, "RequestsV2", load)
    sampler = step.sampler(config)
    loaded.throw_away()
    assert emitted(sampler(step.logits.clone(), step.batch(), step.draft_logits)) == expected
    # Asleep, the engine preempts its requests; the runner hears of it when it is awake.
    requests, before = sampler.requests, sampler.requests.records.table.clone()
    loaded.throw_away()
    states = requests._req_states
    ids = {str(place): slot for place, slot in enumerate(step.slots.tolist())}
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
