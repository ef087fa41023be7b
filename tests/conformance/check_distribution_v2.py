"""What Model Runner V2 emits for sampled requests, and what it says of it: all of it.

Run by `test_sampler_v2.py`, in a process whose Triton is the interpreter. It takes 50 ms for a
request, hence small cases; `check_sampler_v2.py` compares token by token.
"""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from enumerated import FEATURES, Batch, case_of
from steps_v2 import Request, Step, emitted
from vllm_mars.kernels import accept_kernel, clip_kernel, draw_kernel

# What drafts are drawn at.
SHARE = 0.5
DAILY = "price", "struck out", "bound alone", "guard", "ends", "later end", "protected", "all"
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in FEATURES if name not in DAILY]


def filled(like, of_places, seed, rest):
    """Of a request's row, a float32 tensor of the interpreter; the seed is its place."""
    like, row = like.to(tl.float32), of_places[int(seed.handle.data.item())]
    data = np.full(like.handle.data.shape, rest, dtype=np.float32)
    data[: len(row)] = row
    return tl.tensor(TensorHandle(data, tl.float32), like.type)


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("name", [*DAILY, *NIGHTLY])
def test_v2(monkeypatch, is_drawn, name):
    """All probes of a case in one step."""
    batch = Batch(case := case_of(2, name, is_drawn=is_drawn, every=8))
    monkeypatch.setattr(clip_kernel, "TOLERANCE", 1e-6)
    uniform, log_noise = batch.uniform, batch.noise.log()

    def drawn(seeds_ptr, pos_ptr, slot, row, *_):
        return filled(row, uniform, tl.load(seeds_ptr + slot), 1.0)

    def noised_argmax(logits, keys, mask, seed, *_, **__):
        noised = logits - filled(logits, log_noise, seed, np.inf)
        return tl.max(noised, axis=0, return_indices=True)

    monkeypatch.setattr(accept_kernel, "_drawn", drawn)
    monkeypatch.setattr(draw_kernel, "gumbel_noised_argmax", noised_argmax)
    own = [3, 1, 4, *case.answer], 3, 3
    requests = [Request(case.params(i), path, *own) for i, path in enumerate(batch.paths)]
    draft_logits = SHARE * batch.q.log() if case.is_drawn else None
    step = Step(requests, batch.logits.flatten(0, 1), draft_logits)
    sampler = step.sampler(case.config, protected=case.protected)
    # To compile for a first step is counted, too.
    sampler._is_warm = True
    sampler.drawn_at = lambda: torch.full((len(requests) + 2,), SHARE)
    lost = sampler.requests._records.lost
    lost[step.states] = case.lost
    monkeypatch.setattr(sampler.requests, "returns", lambda _: {0: "asks"})
    # By row of the input tokens.
    struck = torch.nn.functional.pad(batch.is_struck, (1, 0)).flatten()
    output = sampler(step.logits.clone(), step.batch(), step.draft_logits, struck)
    batch.check(sampler.verification, emitted(output), lost[step.states] - case.lost)
