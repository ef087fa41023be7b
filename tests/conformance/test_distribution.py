"""What V1 emits for sampled requests, and what it says of it, against the enumerated rule."""

import pytest
import torch

import enumerated
import steps_v1
from vllm_mars import MarsConfig

COUNT = 4_000
RULES = [
    ("theta", 1.0),
    ("theta", 0.9),
    ("theta", 0.5),
    ("price", 0.0),
    ("price", 0.4),
    ("price", 2.0),
]


@pytest.mark.usefixtures("mended_kernels")
@pytest.mark.parametrize(("rule", "value"), RULES)
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("strict", [(), (1,), (0,)])
def test_v1(monkeypatch, is_drawn, top_k, rule, value, strict):
    if is_drawn and rule != "price" and value != 1:
        pytest.skip("refused at start")
    drafts = enumerated.drafts(COUNT, is_drawn)
    metadata = steps_v1.metadata_of(drafts.tolist())
    metadata.draft_token_ids = drafts.flatten().int()
    torch.manual_seed(0)
    sampler = steps_v1.mars_sampler(MarsConfig(**{rule: value}, repeat_guard=0, strict_opening=0))
    step = sampler.requests.step

    def with_strict(given):
        requests, _ = step(given)
        return requests, [int(offset in strict) * 5 for offset in range(2)] * COUNT

    monkeypatch.setattr(sampler.requests, "step", with_strict)
    monkeypatch.setattr(sampler.requests, "returns", lambda batch: {0: "asks"})
    output = sampler(
        metadata,
        enumerated.DRAFT.float().repeat(COUNT, 1) if is_drawn else None,
        enumerated.LOGITS.repeat(COUNT, 1),
        steps_v1.sampling(
            [1.0] * COUNT,
            drafts=drafts.tolist(),
            top_k=torch.full((COUNT,), top_k) if top_k else None,
        ),
    )
    samples = [
        tuple(token for token in row if token != -1) for row in output.sampled_token_ids.tolist()
    ]
    table = sampler.verification.returned[0].table[:, 0].nansum(1).tolist()
    expected = enumerated.emitted(is_drawn, top_k, rule, value, set(strict))
    enumerated.check(samples, table, expected)
    # What is counted is the divergence that the rule causes.
    lost = sampler.verification.counters.device_counts[sampler.verification.counters.layout.lost]
    divergence = sum(share * ratio for share, ratio in expected.values())
    assert lost.item() * 2**-16 / COUNT == pytest.approx(divergence, rel=0.1, abs=1e-4)
