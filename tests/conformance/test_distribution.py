"""What V1 emits for sampled requests, and what it says of it: all of it, by enumeration."""

import pytest
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor.interface import BatchUpdate

import steps_v1
from enumerated import FEATURES, Batch, Case, random_case
from vllm_mars.kernels import clip
from vllm_mars.runner import sampler_v1


@pytest.fixture
def verify(mended_kernels, monkeypatch):
    """Verifies a case's probes in one step."""
    monkeypatch.setattr(clip, "TOLERANCE", 1e-6)

    def run(case):
        batch = Batch(case)
        count, uniform = len(batch.probes), batch.uniform.flatten()
        for module in (rejection_sampler, sampler_v1):
            monkeypatch.setattr(module, "generate_uniform_probs", lambda *_: uniform, raising=False)
        monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, **_: self.copy_(batch.noise))
        sampler = steps_v1.mars_sampler(case.config, case.protected)
        requests = sampler.requests
        # Answers grow behind a request's start; of what it comes with all counts as lost.
        answers = [[] for _ in batch.probes]
        added = [(place, case.params(), [3, 1], answer) for place, answer in enumerate(answers)]
        requests.update_state(BatchUpdate(count, removed=[], added=added, moved=[]))
        for answer in answers:
            answer.extend(case.answer)
        slots = requests._slots[:count]
        requests._records.lost[slots] = case.lost
        monkeypatch.setattr(requests, "returns", lambda _: {0: "asks"})
        metadata = steps_v1.metadata_of(batch.paths)
        metadata.draft_token_ids = torch.tensor(batch.paths).flatten().int()
        output = sampler(
            metadata,
            batch.q.flatten(0, 1) if case.is_drawn else None,
            batch.logits.flatten(0, 1),
            steps_v1.sampling([1.0] * count, output=answers, drafts=batch.paths),
        )
        # The bonus token is drawn by a kernel of vLLM's.
        lost = requests._records.lost[slots] - case.lost
        batch.check(sampler, steps_v1.emitted(output), lost, knows_bonus=False)

    return run


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", FEATURES)
def test_feature(verify, is_drawn, seed, name):
    verify(Case(is_drawn, **{"seed": seed, **FEATURES[name]}))


@pytest.mark.parametrize("theta", [0.9, 0.5])
def test_theta(verify, theta):
    verify(Case(False, price=None, theta=theta))


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 100), marks=pytest.mark.nightly)], ids=str
)
def test_random(verify, steps, seeds):
    for seed in seeds:
        verify(random_case(seed, steps=steps, vocab=5 + seed % 4 // steps))
