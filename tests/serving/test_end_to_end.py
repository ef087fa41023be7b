"""Real vLLM engines on the packaged model: identity at theta = 1, the rule below it.

By day one lossy engine answers with each theta that a request asks for. At night engines of that
theta do so, too, in processes of their own. `tests/conformance` samples.
"""

import os
from typing import Any, NamedTuple

import pytest
import torch

from engines import MARS, NGRAM, PACKAGED, counters, engine_in_process, packaged_engine

pytestmark = pytest.mark.engine

SAMPLER = "vllm_mars.runner.sampler_v1.MarsRejectionSampler"
PROMPTS = [
    "Rewrite in the past tense: The fox jumps over the dog, and then the fox runs from the dog.",
    "Write a Python function that returns the sum of a list of numbers, then call it twice.",
    "List the days of the week, one on each line, with the word 'day' after each of them.",
    "Repeat this sentence three times: The rain in Spain stays mainly in the plain.",
    "What is the capital of France, and what is the capital of Italy?",
    "Explain in three sentences why the sky is blue.",
]


class Run(NamedTuple):
    """What one engine produced, and how many tokens its drafts brought."""

    worker: dict[str, Any]
    prompts: list[list[int]]
    tokens: list[list[int]]
    drafts: float
    accepted: float

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts


def look_at_worker(worker):
    """Runs in the worker: the sampler's class and the process."""
    sampler = getattr(worker.model_runner, "rejection_sampler", None)
    return {
        "sampler": f"{type(sampler).__module__}.{type(sampler).__qualname__}",
        "pid": os.getpid(),
    }


def generate(llm, extra_args=None):
    from vllm import SamplingParams

    (worker,) = llm.collective_rpc(look_at_worker)
    params = SamplingParams(temperature=0, max_tokens=32, extra_args=extra_args)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    before = drafted_and_accepted(llm)
    outputs = llm.chat(chats, params, use_tqdm=False)
    counts = (b - a for a, b in zip(before, drafted_and_accepted(llm), strict=True))
    prompts = [list(output.prompt_token_ids) for output in outputs]
    return Run(worker, prompts, [list(output.outputs[0].token_ids) for output in outputs], *counts)


def drafted_and_accepted(llm):
    """The engine's counters of drafts and of accepted tokens; 0 without speculation."""
    found = counters(llm)
    names = ("num_drafts", "num_accepted_tokens")
    return [found.get(f"vllm:spec_decode_{name}", 0) for name in names]


CHOICE = {**MARS, "mars_theta": 0.95, "mars_limit": 0.3}
IN_PROCESS = {**PACKAGED, "skip_tokenizer_init": False}
# Who says which theta holds.
BY = ["request", pytest.param("server", marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def autoregressive(packaged_model):
    with engine_in_process(packaged_model, None, **IN_PROCESS) as llm:
        return generate(llm)


@pytest.fixture(scope="module")
def strict(packaged_model, autoregressive):
    """vLLM's own verification with the plugin installed but not asked for."""
    with engine_in_process(packaged_model, NGRAM, **IN_PROCESS) as llm:
        return generate(llm)


# After `strict`: two engines in one process disturb each other.
@pytest.fixture(scope="module")
def by_request(packaged_model, strict):
    """Of an engine whose requests may choose theta from 0.3 on."""
    with engine_in_process(packaged_model, CHOICE, **IN_PROCESS) as llm:
        return {theta: generate(llm, extra_args={"mars_theta": theta}) for theta in (1.0, 0.9)}


def verified(request, theta):
    """What an engine of this theta generates, or the lossy one where each request asks for it."""
    if request.param == "request":
        return request.getfixturevalue("by_request")[theta]
    model = request.getfixturevalue("packaged_model")
    with packaged_engine(model, {**MARS, "mars_theta": theta}) as llm:
        run = generate(llm)
    assert run.worker["pid"] != os.getpid()
    return run


@pytest.fixture(scope="module", params=BY)
def theta_1(request):
    return verified(request, 1.0)


@pytest.fixture(scope="module", params=BY)
def theta_09(request):
    return verified(request, 0.9)


def test_not_asked_for_changes_nothing(autoregressive, strict):
    assert strict.worker["sampler"] == "vllm.v1.sample.rejection_sampler.RejectionSampler"
    assert strict.tokens == autoregressive.tokens


def test_theta_1_is_vllm(strict, theta_1):
    assert theta_1.worker["sampler"] == SAMPLER
    assert theta_1.tokens == strict.tokens
    assert (theta_1.drafts, theta_1.accepted) == (strict.drafts, strict.accepted)


def test_theta_09_accepts_more(strict, theta_09):
    assert theta_09.acceptance_length > strict.acceptance_length


def test_relaxed_tokens_are_runners_up(packaged_model, theta_09):
    """Checked by an independent forward pass: every token is first, or second within the margin."""
    from transformers import AutoModelForCausalLM

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
