"""What V1 emits for sampled requests, and what it says of it: all of it, by enumeration."""

import pytest
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor.interface import BatchUpdate

import steps_v1
from enumerated import FEATURES, Batch, case_of
from vllm_mars.kernels.accept import naive as accept
from vllm_mars.kernels.law import naive as clip
from vllm_mars.worker import sampler_v1

NIGHTLY = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 9)]


@pytest.mark.usefixtures("mended_kernels")
@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("seed", [1, 2, *NIGHTLY])
@pytest.mark.parametrize("name", FEATURES)
def test_v1(monkeypatch, is_drawn, seed, name):
    """All probes of a case in one step; by night together with other features."""
    names = [*FEATURES][seed % 3 :: 7] if seed > 2 and name != "theta" else []
    sizes = {"steps": 1 + seed % 3, "vocab": 8 - seed % 3}
    batch = Batch(case := case_of(seed, *names, name, is_drawn=is_drawn, **sizes))
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
