"""The guard against repetition on a real GPU: the definition's answers, and no wait."""

import numpy as np
import pytest
import torch

from vllm_mars.kernels.terms import Drafts, Verdict
from vllm_mars.runner.repeats import AnswerNgrams, DeviceAnswer, DeviceAnswers

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

DEVICE = torch.device("cuda")


def to_device(values):
    return torch.tensor(values, pin_memory=True).to(DEVICE, non_blocking=True)


def test_equals_the_definition_without_a_sync():
    rng = np.random.default_rng(0)
    length, requests, steps = 4, 16, 8
    held = DeviceAnswers(length, requests, DEVICE, to_device)
    batch = [DeviceAnswer(rng.integers(0, 4, n).tolist()) for n in rng.integers(0, 3000, requests)]
    held.follow(batch)
    found, expected = [], []
    for step in range(steps):
        drafts = [rng.integers(0, 4, n).tolist() for n in rng.integers(0, 20, requests)]
        ids = torch.tensor([t for draft in drafts for t in draft], dtype=torch.int32).to(DEVICE)
        ends = torch.tensor([len(draft) for draft in drafts]).cumsum(0).int().to(DEVICE)
        blocked = torch.zeros(len(ids), dtype=torch.int8, device=DEVICE)
        # The first step compiles.
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            held.block_repeats(blocked, batch, Drafts(torch.empty(0, 0), ids, ends))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(blocked)
        for answer, draft in zip(batch, drafts, strict=True):
            expected += AnswerNgrams(length).repeated(answer.tokens, draft)
            answer.tokens += draft
    wanted = [Verdict.REPEAT * is_repeat for is_repeat in expected]
    assert torch.cat(found).tolist() == wanted
    assert any(wanted)
