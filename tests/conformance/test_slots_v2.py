"""State of requests between steps of Model Runner V2, on vLLM's state."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.step_v2 import Request, Step
from steps_v2 import GREEDY, LENGTHS, each, emitted, lost_by_ended, params, random_step
from vllm_mars import MarsConfig
from vllm_mars.kernels.budget import loss_rate, max_lost
from vllm_mars.releases import draws_anew
from vllm_mars.worker.draft_sampling_v2 import wrap_speculator

pytestmark = pytest.mark.interpreted


def wrapped_speculator(sampler, config, propose):
    """vLLM's speculator with probabilistic drafts, as MARS wraps it."""
    speculator = SimpleNamespace(
        draft_logits=torch.empty(1),
        draft_watermarker=None,
        init_cudagraph_manager=None,
        capture=None,
        propose=propose,
    )
    runner = SimpleNamespace(
        speculator=speculator,
        sampler=sampler.sampler,
        req_states=sampler.requests._req_states,
    )
    wrap_speculator(runner, config, sampler.requests)
    return speculator


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_losses_are_recorded_by_slot(temperature):
    """A new request, one with a bound, and one that resumes after two tokens."""
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
        # Half a nat each. The last request has earned a quarter since it resumed.
        assert [tokens[0] for tokens in emitted(output)[:2]] == [0, 0]
        assert lost() == [number * 2**15] * 2 + before[2:]


def test_draft_temperatures_follow_the_slots_request():
    """vLLM changes the buffer of temperatures with each new request."""
    config = MarsConfig(price=0.1, draft_temperature=0.5)
    step = Step([Request(params(), [0])], torch.zeros(2, 9), torch.zeros(1, 1, 9))
    sampler, batch, seen = step.sampler(config), step.batch(), []

    def propose(input_batch, temperature, seeds):
        seen.append(temperature.clone())

    speculator = wrapped_speculator(sampler, config, propose)
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
        assert seen[-1][slot] == temperature / 2


@pytest.mark.skipif(draws_anew(), reason="vLLM does it")
@pytest.mark.parametrize("draft_temperature", [None, 1.0])
def test_each_steps_draft_has_other_random_numbers(draft_temperature):
    """In block verification, acceptance depends on the numbers of all positions.

    After a step without a draft the same numbers may come again, since that step verified none.
    """
    config = MarsConfig(price=0.1, draft_temperature=draft_temperature)
    step = Step([Request(params(1.0, 7), [0])], torch.zeros(2, 9), torch.zeros(1, 1, 9))
    sampler, batch, seen, verified = step.sampler(config), step.batch(), [], []

    def propose(input_batch, temperature, seeds):
        seen.append(seeds[step.slots].tolist())

    speculator = wrapped_speculator(sampler, config, propose)
    states, sampling = sampler.requests._req_states, sampler.sampler.sampling_states
    for is_verified in (True, False, True, True):
        speculator.propose(batch, sampling.temperature.gpu, sampling.seeds.gpu)
        num_emitted = torch.ones(1, dtype=torch.int32)
        if is_verified:
            verified += seen[-1]
            num_emitted = sampler(step.logits.clone(), batch, step.draft_logits).num_sampled
        states.total_len.gpu[step.slots] += num_emitted
    assert len({*verified}) == 3
    assert sampling.seeds.gpu[step.slots].tolist() == [7]


@pytest.mark.parametrize("owner", ["speculator", "RequestState"])
def test_a_missing_attribute_of_vllm_is_an_error(owner):
    step = Step([Request(params(), [0])], torch.zeros(2, 9))
    sampler = step.sampler(MarsConfig(price=0.1))
    if owner == "speculator":
        runner = SimpleNamespace(speculator=object(), sampler=sampler.sampler)
        with pytest.raises(RuntimeError, match="object has no draft_logits, by which"):
            wrap_speculator(runner, MarsConfig(price=0.1), sampler.requests)
        return
    # A dummy run uses a slot without a request.
    sampler.sampler.add_request(0, params())
    slot = int(step.slots[0])
    with pytest.raises(RuntimeError, match=f"Request '0' is in slot {slot}, but RequestState"):
        sampler.sampler.add_request(slot, params())


@pytest.mark.parametrize("answered", [0, 1])
def test_a_span_of_the_prompt_stays_open(answered):
    """For new requests, and for those that resume with output tokens."""
    config = MarsConfig(theta=0.01, strict_spans=((90, 91),), strict_opening=0, turns=(80,))
    step = random_step(3, each(GREEDY), LENGTHS, ranks=(0, 1, 1))
    strict = emitted(step.run(None))

    def tokens(*last):
        for request in step.requests:
            prompt = [5, 8, 80, 8, 90, 7, *[8] * 400, *last]
            request.prompt_len, request.tokens = len(prompt), [*prompt, 9, *[9] * answered]
        return emitted(step.run(config))

    # After another special token; closed; opened in an earlier message.
    assert tokens(1, 8) == strict
    assert tokens(91, 8) != strict
    assert tokens(80, 8) != strict


def test_a_preempted_request_keeps_its_losses():
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
    # For a further input vLLM removes the request and adds it again, and its losses are reported
    # once.
    states.remove_request(name)
    states.add_request(name, 4, [5, 7, 9, 1], 0, 50)
    assert lost_by_ended(requests, [], []) == (1, 777)
    requests.records.lost[states.req_id_to_index[name]] = 777

    def resume(preempted, finished):
        lost_by_ended(requests, preempted, finished)
        states.remove_request(name)
        # With two output tokens, in any free slot.
        states.add_request(name, 3, [5, 7, 9, 1, 2], 0, 50)
        slot = states.req_id_to_index[name]
        sampler.sampler.add_request(slot, params())
        states.apply_staged_writes()
        sampler.sampler.apply_staged_writes()
        return int(requests.records.lost[slot])

    assert resume([name], []) == 777
    # A request that has ended is forgotten, and an unknown one counts as having lost its whole
    # budget.
    all_lost = max_lost(loss_rate(0.02), 2)
    assert resume([name], [name]) == all_lost != 777
