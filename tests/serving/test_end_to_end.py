"""Real vLLM engines on the packaged model: identity at theta = 1, the rule below it.

By day one lossy engine answers greedily with each theta that a request asks for. At night engines
of that theta do so, too, in processes of their own, and sample.
"""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engines import MARS, NGRAM, PACKAGED, engine_in_process, packaged_engine

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


@dataclass
class Run:
    """What one engine produced."""

    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    worker: dict[str, Any] = field(default_factory=dict)
    drafts: float = 0
    accepted: float = 0

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


def mend_worker(worker):
    from vllm_mars.runner.cpu_kernels import mend

    mend()


def sampling_batches(extra_args):
    """Greedy alone, and two batches that mix requests of every kind, all seeded."""
    from vllm import SamplingParams

    def params(**options):
        return SamplingParams(extra_args=extra_args, **options)

    greedy = params(temperature=0, max_tokens=32)
    sampled = [
        params(temperature=0.8, top_p=0.9, seed=1, max_tokens=40),
        params(temperature=1.0, top_k=20, top_p=0.95, seed=2, max_tokens=40),
        params(temperature=0, max_tokens=40),
        params(temperature=1.2, top_k=50, top_p=0.8, seed=4, max_tokens=40),
        params(temperature=0.5, seed=5, max_tokens=40),
        params(temperature=0, max_tokens=40),
    ]
    constrained = [
        params(temperature=0, repetition_penalty=1.3, max_tokens=32),
        params(temperature=0.7, seed=6, frequency_penalty=0.8, max_tokens=32),
        params(temperature=0, bad_words=["day", " day"], max_tokens=32),
        params(temperature=0, allowed_token_ids=list(range(100, 9000)), max_tokens=32),
        params(temperature=0, min_tokens=30, max_tokens=32, logprobs=2),
        params(temperature=0.9, seed=7, logprobs=1, max_tokens=32),
    ]
    return {"greedy": [greedy] * len(PROMPTS), "sampled": sampled, "constrained": constrained}


def drafted_and_accepted(llm):
    """The engine's counters of drafts and of accepted tokens; 0 without speculation."""
    metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = ("num_drafts", "num_accepted_tokens")
    return [metrics.get(f"vllm:spec_decode_{name}", 0) for name in names]


def generate(llm, batches=("greedy",), mend=False, extra_args=None):
    run = Run()
    (run.worker,) = llm.collective_rpc(look_at_worker)
    if mend:
        llm.collective_rpc(mend_worker)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for name in batches:
        before = drafted_and_accepted(llm)
        outputs = llm.chat(chats, sampling_batches(extra_args)[name], use_tqdm=False)
        run.prompts = [list(output.prompt_token_ids) for output in outputs]
        run.tokens[name] = [list(output.outputs[0].token_ids) for output in outputs]
        run.texts[name] = [output.outputs[0].text for output in outputs]
        if name == "greedy":
            after = drafted_and_accepted(llm)
            run.drafts, run.accepted = (b - a for a, b in zip(before, after, strict=True))
    return run


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
def lossy(packaged_model, strict):
    """An engine whose requests may choose theta from 0.3 on."""
    with engine_in_process(packaged_model, CHOICE, **IN_PROCESS) as llm:
        yield llm


@pytest.fixture(scope="module")
def by_request(lossy):
    """At once for each theta: the metrics of the next engine take the place of these."""
    return {theta: generate(lossy, extra_args={"mars_theta": theta}) for theta in (1.0, 0.9)}


def verified(request, theta):
    """What an engine of this theta generates, or the lossy one where each request asks for it."""
    if request.param == "request":
        return request.getfixturevalue("by_request")[theta]
    model = request.getfixturevalue("packaged_model")
    with packaged_engine(model, {**MARS, "mars_theta": theta}) as llm:
        run = generate(llm)
    assert run.worker["pid"] != os.getpid(), "its end would end the lossy engine"
    return run


@pytest.fixture(scope="module", params=BY)
def theta_1(request):
    return verified(request, 1.0)


@pytest.fixture(scope="module", params=BY)
def theta_09(request):
    return verified(request, 0.9)


def test_not_asked_for_changes_nothing(autoregressive, strict):
    assert strict.worker["sampler"] == "vllm.v1.sample.rejection_sampler.RejectionSampler"
    assert strict.tokens["greedy"] == autoregressive.tokens["greedy"]


def test_theta_1_is_vllm(strict, theta_1):
    assert theta_1.worker["sampler"] == SAMPLER
    assert theta_1.tokens == strict.tokens


@pytest.mark.nightly
def test_theta_1_is_vllm_when_sampling(packaged_model):
    """With the worker in another process; by day `tests/conformance` samples."""
    runs = {}
    for name, given, options in (
        ("vllm", NGRAM, {"mend": True}),
        ("server", {**MARS, "mars_theta": 1.0}, {}),
        ("request", CHOICE, {"extra_args": {"mars_theta": 1.0}}),
    ):
        with packaged_engine(packaged_model, given) as llm:
            runs[name] = generate(llm, ("sampled", "constrained"), **options)
    for name in ("server", "request"):
        assert runs[name].worker["sampler"] == SAMPLER
        assert runs[name].worker["pid"] != os.getpid()
        assert runs[name].tokens == runs["vllm"].tokens


def test_theta_1_accepts_what_vllm_accepts(strict, theta_1):
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
    for prompt, tokens in zip(theta_09.prompts, theta_09.tokens["greedy"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        (first, second), emitted = (
            logits.topk(2).values.T,
            logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1),
        )
        is_first = emitted >= first - tolerance
        is_runner_up = (emitted >= second - tolerance) & (emitted > 0.9 * first - tolerance)
        assert (is_first | is_runner_up).all()
        relaxed += int((~is_first).sum())
    assert relaxed > 0
