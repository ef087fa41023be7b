"""What Model Runner V2 samples, and what it says of it, against the enumerated rule.

Run by `test_sampler_v2.py`, in a process whose Triton is the interpreter. It takes 20 ms for a
request, hence few of them; `check_sampler_v2.py` compares token by token.
"""

import pytest
import torch
from vllm import SamplingParams

import enumerated
from steps_v2 import Request, Step, emitted
from vllm_mars import MarsConfig
from vllm_mars.kernels import clip_kernel
from vllm_mars.kernels.clip import TOLERANCE


@pytest.mark.parametrize(
    ("is_drawn", "top_k", "rule", "value", "count", "protected"),
    [
        pytest.param(False, None, "theta", 1.0, 400, (), marks=pytest.mark.nightly),
        (False, None, "theta", 0.9, 150, ()),
        # The first draft of the two.
        (False, None, "theta", 0.9, 150, (enumerated.FIXED[0],)),
        pytest.param(True, None, "price", 0.0, 400, (), marks=pytest.mark.nightly),
        (False, None, "price", 1.0, 150, ()),
        pytest.param(False, 3, "price", 1.0, 400, (), marks=pytest.mark.nightly),
        (True, None, "price", 1.0, 150, ()),
        pytest.param(True, 3, "price", 1.0, 400, (), marks=pytest.mark.nightly),
    ],
)
def test_distribution(monkeypatch, is_drawn, top_k, rule, value, count, protected):
    requests = [
        Request(SamplingParams(temperature=1.0, seed=seed, top_k=top_k or -1), drafts, [3, 1, 4, 1])
        for seed, drafts in enumerate(enumerated.drafts(count, is_drawn).tolist())
    ]
    draft_logits, share = None, 0.5
    if is_drawn:
        draft_logits = share * enumerated.DRAFT.log().float().expand(count, -1, -1)
    step = Step(requests, enumerated.LOGITS.repeat(count, 1), draft_logits)
    sampler = step.sampler(
        MarsConfig(**{rule: value}, repeat_guard=0, strict_opening=0), protected=protected
    )
    sampler.drawn_at = torch.full((count + 2,), share)
    # As exact as the formula.
    monkeypatch.setattr(clip_kernel, "TOLERANCE", TOLERANCE)
    monkeypatch.setattr(sampler.requests, "returns", lambda _: {0: "asks"})
    output = sampler(step.logits.clone(), step.batch(), step.draft_logits, None)
    samples = [tuple(tokens) for tokens in emitted(output)]
    ratios = sampler.verification.returned[0].table[:, 0].nansum(1).tolist()
    strict = {0} if protected else set()
    enumerated.check(samples, ratios, enumerated.emitted(is_drawn, top_k, rule, value, strict))
