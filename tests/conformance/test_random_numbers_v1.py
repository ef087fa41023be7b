"""V1: what MARS draws from the random numbers that requests without a seed share."""

import pytest
import torch
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

import steps_v1
from vllm_mars import MarsConfig

pytestmark = pytest.mark.usefixtures("mended_kernels")


def states_after(sampler, lengths, temperatures, seeds):
    """The shared random numbers' state and the requests' own after one step."""
    metadata, logits = steps_v1.step(3, lengths)
    drafts = steps_v1.drafts_of(metadata)
    meta = steps_v1.sampling(temperatures, seeds=seeds, drafts=drafts)
    torch.manual_seed(0)
    sampler(metadata, None, logits, meta)
    return [torch.get_rng_state(), *(own.get_state() for own in meta.generators.values())]


@pytest.mark.parametrize("lengths", [[3, 2, 1], [0, 3, 0], [0, 0, 0]])
@pytest.mark.parametrize("temperatures", [[1.0, 0.7, 1.2], [0.0, 1.0, 0.0]])
def test_as_many_as_vllm(lengths, temperatures):
    seeds = [1, None, None]
    vllm = RejectionSampler(Sampler(), None, steps_v1.CPU)
    mars = steps_v1.mars_sampler(MarsConfig(theta=1.0))
    for own, ours in zip(
        states_after(vllm, lengths, temperatures, seeds),
        states_after(mars, lengths, temperatures, seeds),
        strict=True,
    ):
        assert torch.equal(own, ours)


def test_a_greedy_step_draws_none():
    mars = steps_v1.mars_sampler(MarsConfig(theta=1.0))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    after, *_ = states_after(mars, [3, 0, 1], [0.0] * 3, [None] * 3)
    assert torch.equal(before, after)
