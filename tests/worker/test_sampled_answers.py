"""Sampled answers of a real engine, against the target's distribution.

A forward pass of the target gives log p of each token. In text sampled from the target, the mean
surprise -log p of a token is the entropy at its position; for tokens sampled from m, the mean of
p / m is 1.
"""

import math

import numpy as np
import pytest
import torch

from engines import PACKAGED, counters, engine_in_process
from vllm_mars.lab.prompts import load_prompts
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.drafts import speculative_config

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PRICES = (0.0, 0.6)
NUM_PROMPTS = 16
ANSWERS = 4
MAX_TOKENS = 48
# Difference between two implementations of the forward pass, in nats.
ROUNDING = 5e-3


def surprise(target, prompt, tokens):
    """log p of each token, and the entropy and the variance of the surprise at its position."""
    with torch.inference_mode():
        logits = target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.double().log_softmax(-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).sum(-1)
    variance = (probs * logprobs**2).sum(-1) - entropy**2
    of_tokens = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return of_tokens.numpy(), entropy.numpy(), variance.numpy()


def check_weights(weights):
    """Checks that the mean of p / m is 1."""
    assert weights.std() > 0.05
    error = weights.std() / math.sqrt(len(weights))
    assert abs(weights.mean() - 1) < 4 * error, (weights.mean(), error)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("drafts", ("greedy", "probabilistic"))
def test_sampled_answers_follow_the_served_distribution(drafts, packaged_model):
    """At price 0 the target's, else the one that `log_ratios` and the logprobs report."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    speculation = speculative_config(
        str(PACKAGED_HEAD),
        4,
        draft_sample_method=drafts,
        rejection_sample_method="mars",
        mars_price=PRICES[1],
        mars_logprobs="sampled",
    )
    sampling = {
        price: SamplingParams(
            temperature=1.0,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            logprobs=0,
            extra_args={"mars_price": price, "mars_return": True},
        )
        for price in PRICES
    }
    # Each prompt is answered at both prices in each batch.
    requests = [(prompt, price) for prompt in load_prompts()[:NUM_PROMPTS] for price in PRICES]
    requests *= ANSWERS
    options = {
        **PACKAGED,
        "max_num_seqs": 32,
        "skip_tokenizer_init": False,
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
    }
    with engine_in_process(packaged_model, speculation, **options) as llm:
        outputs = llm.chat(
            [[{"role": "user", "content": prompt.turns[0]}] for prompt, _ in requests],
            [sampling[price] for _, price in requests],
            use_tqdm=False,
        )
        metrics = counters(llm)
    target = AutoModelForCausalLM.from_pretrained(packaged_model, dtype=torch.float32)
    excess = {price: [] for price in PRICES}
    weights = []
    for (_, price), output in zip(requests, outputs, strict=True):
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        log_p, entropy, variance = surprise(target, output.prompt_token_ids, tokens)
        report = answer.spec_decode_metrics.mars
        excess[price].append(((-log_p - entropy).sum(), variance.sum(), report["drift_nats"]))
        ratios = np.array(report["log_ratios"])
        log_m = [entry[token].logprob for entry, token in zip(answer.logprobs, tokens, strict=True)]
        np.testing.assert_allclose(log_m, log_p + ratios, atol=ROUNDING)
        if price:
            weights.append(np.exp(-ratios))
        else:
            assert not ratios.any()
    deviations, drifts = {}, {}
    for price, answers in excess.items():
        above, variance, drifts[price] = map(math.fsum, zip(*answers, strict=True))
        # Standard errors.
        deviations[price] = above / math.sqrt(variance)
        assert abs(above - drifts[price]) < 4 * math.sqrt(variance), (price, above, drifts)
    assert drifts[0.0] == 0
    counted = metrics["vllm:mars_drift_up_nats"] - metrics["vllm:mars_drift_down_nats"]
    assert counted == pytest.approx(drifts[PRICES[1]], rel=0.01)
    if drafts == "greedy":
        # Greedy drafts are likely tokens, so a price shifts text towards them.
        assert deviations[PRICES[1]] < -4, deviations
    check_weights(np.concatenate(weights))
    assert metrics["vllm:mars_gained_acceptance"] > 0
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"]
    assert accepted / metrics["vllm:spec_decode_num_drafts"] > 0.2
