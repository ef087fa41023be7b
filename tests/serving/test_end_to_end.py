"""Real vLLM engines on the packaged model: identity at theta = 1, the rule below it.

One lossy engine serves every theta. Sampled requests are tested in `tests/conformance`.
"""

from typing import NamedTuple

import pytest
import torch

from engines import MARS, NGRAM, PACKAGED, counters, engine_in_process

pytestmark = pytest.mark.engine

PROMPTS = [
    "Rewrite in the past tense: The fox jumps over the dog, and then the fox runs from the dog.",
    "Write a Python function that returns the sum of a list of numbers, then call it twice.",
    "List the days of the week, one on each line, with the word 'day' after each of them.",
    "Repeat this sentence three times: The rain in Spain stays mainly in the plain.",
    "What is the capital of France, and what is the capital of Italy?",
    "Explain in three sentences why the sky is blue.",
]


class Run(NamedTuple):
    """An engine's greedy answers, and its counts of drafts and accepted tokens."""

    sampler: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    drafts: float
    accepted: float


def look_at_worker(worker):
    """Runs in the worker; returns the sampler's class."""
    sampler = type(worker.model_runner.rejection_sampler)
    return f"{sampler.__module__}.{sampler.__qualname__}"


def generate(llm, extra_args=None):
    from vllm import SamplingParams

    (sampler,) = llm.collective_rpc(look_at_worker)
    params = SamplingParams(temperature=0, max_tokens=32, extra_args=extra_args)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    before = drafts_and_accepted(llm)
    outputs = llm.chat(chats, params, use_tqdm=False)
    drafts, accepted = (b - a for a, b in zip(before, drafts_and_accepted(llm), strict=True))
    return Run(
        sampler=sampler,
        prompts=[list(output.prompt_token_ids) for output in outputs],
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
        drafts=drafts,
        accepted=accepted,
    )


def drafts_and_accepted(llm):
    counts = counters(llm)
    return [counts[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens")]


CHOICE = {**MARS, "mars_theta": 0.3}
IN_PROCESS = {**PACKAGED, "skip_tokenizer_init": False}


@pytest.fixture(scope="module")
def strict(packaged_model):
    """vLLM's verification, with the plugin installed but off."""
    with engine_in_process(packaged_model, NGRAM, **IN_PROCESS) as llm:
        return generate(llm)


# After `strict`: two engines in one process disturb each other.
@pytest.fixture(scope="module")
def by_theta(packaged_model, strict):
    """Answers of an engine whose requests may choose theta from 0.3."""
    with engine_in_process(packaged_model, CHOICE, **IN_PROCESS) as llm:
        return {theta: generate(llm, extra_args={"mars_theta": theta}) for theta in (1.0, 0.9)}


def test_theta_1_is_vllm(strict, by_theta):
    theta_1 = by_theta[1.0]
    assert strict.sampler == "vllm.v1.sample.rejection_sampler.RejectionSampler"
    assert theta_1.sampler == "vllm_mars.worker.sampler_v1.MarsRejectionSampler"
    assert theta_1.tokens == strict.tokens
    assert (theta_1.drafts, theta_1.accepted) == (strict.drafts, strict.accepted)


def test_relaxed_tokens_are_runners_up(packaged_model, strict, by_theta):
    """In another forward pass every token is the argmax, or second within the margin."""
    from transformers import AutoModelForCausalLM

    theta_09 = by_theta[0.9]
    assert theta_09.accepted / theta_09.drafts > strict.accepted / strict.drafts
    model = AutoModelForCausalLM.from_pretrained(packaged_model, dtype=torch.float32).eval()
    # The two implementations differ in rounding.
    tolerance = 1e-3
    relaxed = 0
    for prompt, tokens in zip(theta_09.prompts, theta_09.tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        first, second = logits.topk(2).values.T
        emitted = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        is_first = emitted >= first - tolerance
        is_runner_up = (emitted >= second - tolerance) & (emitted > 0.9 * first - tolerance)
        assert (is_first | is_runner_up).all()
        relaxed += int((~is_first).sum())
    assert relaxed > 0
