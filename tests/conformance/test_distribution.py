"""Enumerates what V1 emits and reports for sampled requests."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.spec_decode.eagle import EagleProposer

import steps_v1
from enumerated import FEATURES, PARAMETERS, Batch, case_of
from vllm_mars import MarsConfig
from vllm_mars.kernels.served_dist import naive as clip
from vllm_mars.worker.draft_sampling_v1 import wrap_drafter

NIGHTLY = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 9)]


def check(monkeypatch, case):
    batch = Batch(case)
    monkeypatch.setattr(clip, "TOLERANCE", 1e-6)
    steps_v1.check_probes(monkeypatch, batch, batch.paths, batch.logits)


@pytest.mark.usefixtures("mended_kernels")
@pytest.mark.parametrize("is_probabilistic", [False, True])
@pytest.mark.parametrize("seed", [1, 2, *NIGHTLY])
@pytest.mark.parametrize("name", FEATURES)
def test_v1(monkeypatch, is_probabilistic, seed, name):
    """Nightly cases combine features."""
    names = [*FEATURES][seed % 3 :: 7] if seed > 2 and name != "theta" else []
    sizes = {"steps": 1 + seed % 3, "vocab": 8 - seed % 3}
    check(monkeypatch, case_of(seed, *names, name, is_probabilistic=is_probabilistic, **sizes))


@pytest.mark.usefixtures("mended_kernels")
@pytest.mark.parametrize("price", [0.0, 1.0])
@pytest.mark.parametrize("name", PARAMETERS)
def test_v1_with_drafts_under_parameters(monkeypatch, name, price):
    """The server's drafter samples the drafts."""
    drafter = object.__new__(EagleProposer)
    drafter._enable_probabilistic_draft_probs, drafter.use_fp64_gumbel = True, False
    runner = SimpleNamespace(drafter=drafter, propose_draft_token_ids=lambda *_: None)
    wrap_drafter(runner, MarsConfig(), torch.ones)
    repetition, frequency, presence, top_k, top_p = PARAMETERS[name]
    case = case_of(1, is_probabilistic=True, steps=2, vocab=6, price=price, answer=(1, 2, 0, 2))

    def draft_dist(logits, before):
        runner.propose_draft_token_ids(None, torch.tensor([before]))
        metadata = steps_v1.sampling(
            [1.0],
            output=[[*case.answer]],
            no_penalties=False,
            prompt_token_ids=torch.tensor([[3, 1]]),
            repetition_penalties=[repetition],
            frequency_penalties=[frequency],
            presence_penalties=[presence],
            top_k=torch.tensor([top_k or case.vocab]),
            top_p=torch.tensor([top_p]),
        )
        return drafter._sample_from_logits(torch.tensor(logits)[None], metadata)[1][0].numpy()

    case = replace(case, draft_dist=draft_dist)
    # q differs from the softmax, and top-k and top-p make some tokens impossible.
    q = case.row(()).q
    assert not np.allclose(q, replace(case, draft_dist=None).row(()).q)
    assert (q == 0).any() == (top_k > 0 or top_p < 1)
    # Rows are cached before the probes replace vLLM's random numbers.
    for length in range(case.steps + 1):
        for before in itertools.product(range(case.vocab), repeat=length):
            case.row(before)
    check(monkeypatch, case)
