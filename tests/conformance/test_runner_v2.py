"""Hooks around a step of Model Runner V2, on vLLM's samplers and state."""

import pytest
import torch

# Importing vLLM's CPU worker replaces pinned memory and streams, before the V2 modules bind them.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip
from vllm import SamplingParams

from benchmarks.step_v2 import RunnerV2, Shape, step_of
from steps_v2 import Allocated
from vllm_mars import MarsConfig
from vllm_mars.releases import draws_anew
from vllm_mars.report.counters import Counters
from vllm_mars.worker import sampler_v2

pytestmark = pytest.mark.interpreted

CPU = torch.device("cpu")
BATCH, K = 5, 2


def runner_of(temperature=1.0, is_probabilistic=True, params=None):
    config = MarsConfig(max_loss=0.02, draft_temperature=0.5 if is_probabilistic else None)
    return RunnerV2(
        step_of(Shape(temperature, is_probabilistic, BATCH, K, 97), CPU, params), config
    )


def propose(runner):
    """Drafts as at the end of a step."""
    states = runner.sampler.sampling_states
    runner.speculator.propose(
        runner._batch,
        attn_metadata=None,
        slot_mappings=None,
        last_hidden_states=None,
        aux_hidden_states=None,
        num_sampled=None,
        num_rejected=None,
        last_sampled=None,
        next_prefill_tokens=None,
        temperature=states.temperature.gpu,
        seeds=states.seeds.gpu,
    )


def test_a_second_load_model_installs_nothing_twice():
    """vLLM makes new samplers, but the speculator, slots and the runner's methods stay."""
    once, twice = runner_of(), runner_of()
    owners = {twice: ("execute_model", "sample_tokens", "finish_requests")}
    owners |= {twice.req_states: ("add_request",), twice.speculator: ("propose",)}
    wrapped = [(owner, name, getattr(owner, name)) for owner in owners for name in owners[owner]]
    before = twice.rejection_sampler
    twice.reload()
    assert [getattr(owner, name) for owner, name, _ in wrapped] == [
        method for *_, method in wrapped
    ]
    sampler = twice.rejection_sampler
    assert sampler is not before and sampler.sampler is twice.sampler is not before.sampler
    for runner in (once, twice):
        # So that the step's drafts have been sampled.
        propose(runner)
        runner.step()
    tokens = [runner.sampled.sampled_token_ids.tolist() for runner in (once, twice)]
    assert tokens[0] == tokens[1]
    # Drafts have half the temperature, which verification divides by as well, and seeds that were
    # changed once.
    slots, sampling = twice._batch.idx_mapping, twice.sampler.sampling_states
    temperature, seeds = (values[slots] for values in twice.speculator.given)
    assert temperature.tolist() == [0.5] * BATCH
    if not draws_anew():
        total = twice.req_states.total_len.gpu[slots].long() + twice.sampled.num_sampled
        assert torch.equal(seeds, sampling.seeds.gpu[slots] ^ (total << 32))
    counters = sampler.reports.counters
    twice.step(finished=["1"])
    # All requests from before the reload, and one since.
    assert counters.device_counts[counters.layout.ended].sum() == BATCH + 1


@pytest.mark.parametrize("is_probabilistic", [False, True])
def test_nothing_is_allocated_while_the_model_is_loaded(monkeypatch, is_probabilistic):
    """vLLM's sleep of level 2 discards memory that is allocated then."""
    install, loading, stepping = sampler_v2.install, Allocated(), Allocated()

    def installed(*args):
        with loading:
            install(*args)

    monkeypatch.setattr(sampler_v2, "install", installed)
    runner = runner_of(is_probabilistic=is_probabilistic)
    with stepping:
        runner.step()
    assert stepping.tensors and not loading.tensors


def test_ended_requests_are_counted_by_their_loss():
    """The kernel counts as `Counters.add_ended`."""
    runner = runner_of(is_probabilistic=False)
    lost = [0, 4096, 4097, 40 << 16, 4097]
    requests, counters = runner.rejection_sampler.requests, Counters(K, CPU)
    requests.records.lost[runner._batch.idx_mapping] = torch.tensor(lost)
    requests.leave([], ["0", "2", "4", "unknown"], counters)
    expected = Counters(K, CPU)
    expected.add_ended(torch.tensor(lost[::2]))
    assert torch.equal(counters.device_counts, expected.device_counts)
    assert counters.device_counts.sum() > 0


def test_requests_with_mars_return_are_known_until_they_end():
    params = [
        SamplingParams(temperature=0, extra_args={"mars_return": i == 3}) for i in range(BATCH)
    ]
    runner = runner_of(0.0, False, params)
    requests, slots = runner.rejection_sampler.requests, runner._batch.idx_mapping_np
    assert requests.returns(slots) == {3: "3"}
    assert requests.returns(slots[:3]) == {}
    requests.leave([], ["3"], Counters(K, CPU))
    assert requests.returns(slots) == {}
