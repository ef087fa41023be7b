"""Other architectures, tiny and with random weights: Qwen3's, and Gemma 2's with capped logits."""

import pytest
import torch

import tiny_models
from engines import engine_in_process, greedy_tokens
from vllm_mars.local.drafts import CHOSEN_BY_REQUESTS

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [100, 3, 200], [7, 70, 107]]
# Capped logits lie closer together, so a stricter theta tells whether it is they that count.
THETA = {"qwen3": 0.9, "gemma2": 0.97}
TOKENS = 24


def relaxed_rows(model, answers):
    """The target's logits at each token that is not its first choice, and those tokens."""
    rows, tokens = [], []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        emitted = torch.tensor(answer)
        off = logits.gather(1, emitted[:, None])[:, 0] < logits.max(-1).values - 1e-3
        rows.append(logits[off])
        tokens.append(emitted[off])
    return torch.cat(rows), torch.cat(tokens)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_family(family, tmp_path):
    theta = THETA[family]
    model = getattr(tiny_models, family)(tmp_path / "target").eval()
    tiny_models.blurred(tmp_path / "draft", model, noise=0.07)
    draft = {
        "method": "draft_model",
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 3,
    }
    with engine_in_process(tmp_path / "target", draft) as llm:
        plain = greedy_tokens(llm, PROMPTS, max_tokens=TOKENS)
    with engine_in_process(tmp_path / "target", {**draft, **CHOSEN_BY_REQUESTS["theta"]}) as llm:
        strict, loose = (
            greedy_tokens(llm, PROMPTS, max_tokens=TOKENS, extra_args={"mars_theta": value})
            for value in (1.0, theta)
        )
    assert strict == plain
    assert loose != strict

    # The draft changed the weights in memory.
    target = type(model).from_pretrained(tmp_path / "target").eval()
    rows, tokens = relaxed_rows(target, loose)
    assert len(tokens) > 0
    values, ids = rows.topk(2)
    assert (ids[:, 1] == tokens).all(), "only runners-up"
    assert (values[:, 1] > theta * values[:, 0] - 1e-3).all()
    assert not len(relaxed_rows(target, strict)[1])
    if family == "gemma2":
        cap = target.config.final_logit_softcapping
        uncapped = cap * torch.atanh(values / cap)
        assert (values.abs() < cap).all()
        # Theta acts on what the model puts out: some of these are not close before the cap.
        assert (uncapped[:, 1] < theta * uncapped[:, 0]).any()
