"""What is wrapped around a step of Model Runner V2, on vLLM's real samplers and their state."""

import pytest
import torch

# vLLM's CPU worker puts its stand-ins for pinned memory and streams in place, before the V2 modules
# take them.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip
from vllm import SamplingParams

from benchmarks.step_v2 import RunnerV2, Shape, step_of, tokens_of
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
    """As a step ends."""
    states = runner.sampler.sampling_states
    own = {"temperature": states.temperature.gpu, "seeds": states.seeds.gpu}
    runner.speculator.propose(runner._batch, **own, **dict.fromkeys(PROPOSED))


PROPOSED = (
    *("attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled"),
    *("num_rejected", "last_sampled", "next_prefill_tokens"),
)


def test_a_second_load_model_installs_nothing_twice():
    """vLLM makes new samplers; the speculator, the slots and the runner's methods are the same."""
    once, twice = runner_of(), runner_of()
    owners = {twice: ("execute_model", "sample_tokens", "finish_requests")}
    owners |= {twice.req_states: ("add_request",), twice.speculator: ("propose",)}
    wrapped = [(owner, name, getattr(owner, name)) for owner in owners for name in owners[owner]]
    before = twice.rejection_sampler
    twice.reload()
    assert [getattr(owner, name) for owner, name, _ in wrapped] == [it for *_, it in wrapped]
    sampler = twice.rejection_sampler
    assert sampler is not before and sampler.sampler is twice.sampler is not before.sampler
    for runner in (once, twice):
        # As the drafts of a step have been.
        propose(runner)
        runner.step()
    tokens = [runner.sampled.sampled_token_ids.tolist() for runner in (once, twice)]
    assert tokens[0] == tokens[1]
    # Drafts are drawn at one share of the temperature, which verification divides by as well, and
    # with seeds that one change has met.
    slots, sampling = twice._batch.idx_mapping, twice.sampler.sampling_states
    temperature, seeds = (given[slots] for given in twice.speculator.given)
    assert temperature.tolist() == [0.5] * BATCH
    if not draws_anew():
        total = twice.req_states.total_len.gpu[slots].long() + twice.sampled.num_sampled
        assert torch.equal(seeds, sampling.seeds.gpu[slots] ^ (total << 32))
    counters = sampler.reports.counters
    twice.step(finished=["1"])
    # All before the model was loaded again, and one since.
    assert counters.device_counts[counters.layout.ended].sum() == BATCH + 1


@pytest.mark.parametrize("is_probabilistic", [False, True])
def test_nothing_is_allocated_while_the_model_is_loaded(monkeypatch, is_probabilistic):
    """Whose memory vLLM's sleep of level 2 throws away."""
    install, loading, stepping = sampler_v2.install, Allocated(), Allocated()

    def installed(*args):
        with loading:
            install(*args)

    monkeypatch.setattr(sampler_v2, "install", installed)
    runner = runner_of(is_probabilistic=is_probabilistic)
    with stepping:
        runner.step()
    assert stepping.found and not loading.found


def test_requests_that_end_are_counted_by_what_they_lost():
    """In one launch, as `Counters.add_ended` counts."""
    runner = runner_of(is_probabilistic=False)
    lost = [0, 4096, 4097, 40 << 16, 4097]
    requests, counters = runner.rejection_sampler.requests, Counters(K, CPU)
    requests.records.lost[runner._batch.idx_mapping] = torch.tensor(lost)
    requests.leave([], ["0", "2", "4", "unknown"], counters)
    expected = Counters(K, CPU)
    expected.add_ended(torch.tensor(lost[::2]))
    assert torch.equal(counters.device_counts, expected.device_counts)
    assert counters.device_counts.sum() > 0


def test_who_wants_to_know_is_told_and_forgotten():
    asks = {"mars_return": True}
    params = [
        SamplingParams(temperature=0, extra_args=asks if i == 3 else {}) for i in range(BATCH)
    ]
    runner = runner_of(0.0, False, params)
    requests, places = runner.rejection_sampler.requests, runner._batch.idx_mapping_np
    assert requests.returns(places) == {3: "3"}
    assert requests.returns(places[:3]) == {}
    requests.leave([], ["3"], Counters(K, CPU))
    assert requests.returns(places) == {}


@pytest.mark.parametrize("is_probabilistic", [False, True])
def test_a_step_of_the_runner_verifies_as_the_benchmark_of_the_kernels(is_probabilistic):
    """The stand-in for the runner and `Step.verification` hand in the same step."""
    step = step_of(Shape(1.0, is_probabilistic, BATCH, K, 97), CPU)
    runner = RunnerV2(step, "block" if is_probabilistic else "standard")
    runner.step()
    tokens = runner.sampled.sampled_token_ids
    behind = torch.arange(K + 1) >= runner.sampled.num_sampled[:, None]
    expected = tokens_of(step.verification("block" if is_probabilistic else "standard"))
    assert torch.equal(tokens.masked_fill(behind, -1), expected)
