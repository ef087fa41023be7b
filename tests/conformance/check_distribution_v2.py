"""What Model Runner V2 samples, against the enumerated rule.

Run by `test_sampler_v2.py`, in a process whose Triton is the interpreter. It takes 20 ms for a
request, hence few of them; `check_sampler_v2.py` compares token by token.
"""

import pytest
from vllm import SamplingParams

import enumerated
from steps_v2 import Request, Step, emitted
from vllm_mars import MarsConfig


@pytest.mark.parametrize(
    ("with_draft_probs", "top_k", "theta", "count"),
    [
        pytest.param(False, None, 1.0, 400, marks=pytest.mark.nightly),
        pytest.param(False, None, 0.9, 400, marks=pytest.mark.nightly),
        pytest.param(True, None, 1.0, 400, marks=pytest.mark.nightly),
        pytest.param(True, None, 0.9, 400, marks=pytest.mark.nightly),
        pytest.param(False, 3, 0.9, 150, marks=pytest.mark.nightly),
        pytest.param(True, 3, 0.9, 150, marks=pytest.mark.nightly),
    ],
)
def test_distribution(with_draft_probs, top_k, theta, count):
    requests = [
        Request(SamplingParams(temperature=1.0, seed=seed, top_k=top_k or -1), drafts, [3, 1, 4, 1])
        for seed, drafts in enumerate(enumerated.drafts(count, with_draft_probs).tolist())
    ]
    draft_logits = None
    if with_draft_probs:
        draft_logits = enumerated.DRAFT.log().float().expand(count, -1, -1)
    step = Step(requests, enumerated.LOGITS.repeat(count, 1), draft_logits)
    samples = [tuple(tokens) for tokens in emitted(step.run(MarsConfig(theta=theta)))]
    enumerated.check(samples, theta, with_draft_probs, top_k)
