"""What a real engine samples under speculation, against the target's own distribution.

In text drawn from a distribution the surprise -log p of a token is on average the entropy at its
place, whatever stands before it. A forward pass of the target gives both, so each token counts, and
no second engine is needed.
"""

import math

import pytest
import torch

from engines import PACKAGED, engine_in_process
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import speculative_config
from vllm_mars.local.prompts import load_prompts

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

THETAS = (1.0, 0.9)
NUM_PROMPTS = 16
ANSWERS = 3
MAX_TOKENS = 32


def excess_surprise(target, prompt, answers):
    """Surprise above the entropy, and its variance in such text; summed over all tokens, nats."""
    tokens = torch.tensor(answers)
    context = torch.tensor([prompt]).expand(len(tokens), -1)
    with torch.inference_mode():
        logits = target(torch.cat([context, tokens], 1)).logits[:, len(prompt) - 1 : -1]
    logprobs = logits.double().log_softmax(-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).sum(-1)
    variance = (probs * logprobs**2).sum(-1) - entropy**2
    excess = -logprobs.gather(-1, tokens[..., None])[..., 0] - entropy
    return excess.sum().item(), variance.sum().item()


@pytest.mark.timeout(1200)
def test_sampled_answers_follow_the_target_at_theta_1_alone(packaged_model):
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    given = speculative_config(
        str(PACKAGED_HEAD), 4, rejection_sample_method="mars", mars_theta=1.0, mars_limit=0.5
    )
    sampling = {
        theta: SamplingParams(
            temperature=1.0,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            extra_args={"mars_theta": theta},
        )
        for theta in THETAS
    }
    # Both rules in each batch, each prompt as often under one as under the other.
    asked = [(prompt, theta) for prompt in load_prompts()[:NUM_PROMPTS] for theta in THETAS]
    asked *= ANSWERS
    options = {**PACKAGED, "max_num_seqs": 32, "skip_tokenizer_init": False, "seed": 0}
    with engine_in_process(packaged_model, given, **options) as llm:
        outputs = llm.chat(
            [[{"role": "user", "content": prompt.turns[0]}] for prompt, _ in asked],
            [sampling[theta] for _, theta in asked],
            use_tqdm=False,
        )
        metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    target = AutoModelForCausalLM.from_pretrained(packaged_model, dtype=torch.float32)
    by_prompt = {}
    for (prompt, theta), output in zip(asked, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        by_prompt.setdefault((theta, prompt.id), (output.prompt_token_ids, []))[1].append(answer)
    deviations = {}
    for theta in THETAS:
        found = [
            excess_surprise(target, prompt, answers)
            for (rule, _), (prompt, answers) in by_prompt.items()
            if rule == theta
        ]
        excess, variance = map(math.fsum, zip(*found, strict=True))
        deviations[theta] = excess / math.sqrt(variance)
    # In standard errors.
    assert abs(deviations[1.0]) < 4, deviations
    # So much would a fault of that size show.
    assert deviations[0.9] < -5, deviations
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"]
    assert accepted / metrics["vllm:spec_decode_num_drafts"] > 0.2
