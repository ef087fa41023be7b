"""What V1 emits for sampled requests, and what it says of it: all of it, by enumeration."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.spec_decode.eagle import EagleProposer

import steps_v1
from enumerated import FEATURES, PARAMETERS, Batch, case_of
from vllm_mars import MarsConfig
from vllm_mars.kernels.accept import naive as accept
from vllm_mars.kernels.law import naive as clip
from vllm_mars.worker import sampler_v1
from vllm_mars.worker.draft_sampling_v1 import wrap_drafter

NIGHTLY = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 9)]


@pytest.mark.usefixtures("mended_kernels")
@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("seed", [1, 2, *NIGHTLY])
@pytest.mark.parametrize("name", FEATURES)
def test_v1(monkeypatch, is_drawn, seed, name):
    """All probes of a case in one step; by night together with other features."""
    names = [*FEATURES][seed % 3 :: 7] if seed > 2 and name != "theta" else []
    sizes = {"steps": 1 + seed % 3, "vocab": 8 - seed % 3}
    check(monkeypatch, case_of(seed, *names, name, is_drawn=is_drawn, **sizes))


@pytest.mark.usefixtures("mended_kernels")
@pytest.mark.parametrize("price", [0.0, 1.0])
@pytest.mark.parametrize("name", PARAMETERS)
def test_v1_where_drafts_are_drawn_under_parameters(monkeypatch, name, price):
    """Of a draft model that the server's drafter draws from."""
    drafter = object.__new__(EagleProposer)
    drafter._enable_probabilistic_draft_probs, drafter.use_fp64_gumbel = True, False
    runner = SimpleNamespace(drafter=drafter, propose_draft_token_ids=lambda *_: None)
    wrap_drafter(runner, MarsConfig(), torch.ones)
    repetition, frequency, presence, top_k, top_p = PARAMETERS[name]
    case = case_of(1, is_drawn=True, steps=2, vocab=6, price=price, answer=(1, 2, 0, 2))

    def drawn_from(logits, before):
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

    case = replace(case, drawn_from=drawn_from)
    # So that it is another distribution, and with a cut such as cannot propose some tokens.
    q = case.row(()).q
    assert not np.allclose(q, replace(case, drawn_from=None).row(()).q)
    assert (q == 0).any() == (top_k > 0 or top_p < 1)
    # Before the numbers of the step take the place of vLLM's.
    for length in range(case.steps + 1):
        for before in itertools.product(range(case.vocab), repeat=length):
            case.row(before)
    check(monkeypatch, case)


def check(monkeypatch, case):
    """All probes of a case in one step."""
    batch = Batch(case)
    monkeypatch.setattr(clip, "TOLERANCE", 1e-6)
    count, uniform = len(batch.probes), batch.uniform[batch.is_draft]
    for module in (rejection_sampler, sampler_v1):
        monkeypatch.setattr(module, "generate_uniform_probs", lambda *_: uniform, raising=False)
    # What strict requests draw with, of fixed drafts; and in the place of one number all others.
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, **_: self.copy_(batch.noise))
    draws = lambda _, place, weights: int((weights / batch.noise[place]).argmax())  # noqa: E731
    monkeypatch.setattr(accept.Chance, "draws", draws)
    # Of vLLM's, for the bonus token.
    draw = lambda logits, _: (logits.softmax(-1) / batch.noise).argmax(-1)  # noqa: E731
    monkeypatch.setattr(torch.ops._C, "fused_gumbel_argmax", draw)
    own = case.config, case.protected
    sampler = steps_v1.mars_sampler(*own, longest=case.steps, is_drawn=case.is_drawn)
    requests = sampler.requests
    # Answers grow behind a request's start; of what it comes with all counts as lost.
    answers = [[] for _ in batch.probes]
    added = [(place, case.params(), [3, 1], answer) for place, answer in enumerate(answers)]
    requests.update_state(BatchUpdate(count, removed=[], added=added, moved=[]))
    for answer in answers:
        answer.extend(case.answer)
    slots, lost = requests._slots[:count], requests._records.lost
    lost[slots] = case.lost
    monkeypatch.setattr(requests, "returns", lambda _: {0: "asks"})
    metadata = steps_v1.metadata_of(batch.paths)
    output = sampler(
        metadata,
        batch.q[batch.is_draft] if case.is_drawn else None,
        batch.logits,
        steps_v1.sampling([1.0] * count, output=answers, drafts=batch.paths),
    )
    batch.check(sampler.reports, steps_v1.emitted(output), lost[slots] - case.lost)
