"""What `mars_draft_temperature` does to drawn drafts, on real engines of both model runners."""

import pytest
import torch
from vllm.v1.spec_decode.eagle import EagleProposer

import workload
from vllm_mars import MarsConfig
from vllm_mars.runner.draft_temperature import scale_v1


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.parametrize("v2", [False, True])
def test_cold_drafts_are_verified_as_first_choices(models, v2):
    """Token for token as drafts that are not drawn: in drawing and verification alike.

    Seeds leave the draws that verification makes the same. So small a price adds nothing, but does
    not make a request strict, whose drafts would be drawn at its own temperature.
    """
    directory, draft, _ = models
    every = workload.every_kind(12)
    requests = [every[name] for name in ("greedy", "sampled", "sampled, cool", "sampled, hot")]
    given = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    cold = {"draft_sample_method": "probabilistic", "mars_draft_temperature": 0.01}
    own, mars = (
        workload.run({**given, **options}, [requests], v2=v2, model=str(directory))
        for options in ({}, {**cold, "rejection_sample_method": "mars", "mars_price": 1e-9})
    )
    names = list(map(str, range(len(requests))))
    workload.assert_same_batches([dict(zip(names, requests, strict=True))], own, mars)
    assert "Drafts are drawn at 0.01 of each request's temperature" in mars["log"]
    assert 0 < workload.accepted_share(own, 0) < 1


def test_a_drafter_that_draws_nothing():
    scale_v1(object(), MarsConfig(), torch.ones)
    with pytest.raises(RuntimeError, match="mars_draft_temperature=0.5 .* object draws no drafts"):
        scale_v1(object(), MarsConfig(draft_temperature=0.5), torch.ones)


def test_a_drafter_that_no_longer_says_whether_it_draws():
    drafter = object.__new__(EagleProposer)
    with pytest.raises(RuntimeError, match="EagleProposer has no _enable_probabilistic_draft_prob"):
        scale_v1(drafter, MarsConfig(), torch.ones)
