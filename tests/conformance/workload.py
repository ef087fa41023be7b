"""Requests that vLLM's engines and those with MARS answer, and a runner for the engines."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_mars.releases import draws_anew

HERE = Path(__file__).parent
INTERPRETED = HERE.parent / "interpreted"
STRICT = {"rejection_sample_method": "mars", "mars_theta": 1.0}
STRICT_PRICE = {"rejection_sample_method": "mars", "mars_price": 0.0}
# Exceeds every difference of two logits of the tiny models.
RELAXED = {
    "rejection_sample_method": "mars",
    "mars_price": 1000.0,
    "mars_strict_opening": 0,
}

Request = tuple[list[int] | str, dict[str, Any]]


def draft_model(draft: Path, **options: Any) -> dict[str, Any]:
    """A draft model with probabilistic drafts."""
    return {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
        **options,
    }


def eagle(models: Path, **options: Any) -> dict[str, Any]:
    """An EAGLE head with fixed drafts, vLLM's default."""
    return {
        "method": "eagle",
        "model": str(models / "eagle"),
        "num_speculative_tokens": 3,
        "draft_sample_method": "greedy",
        **options,
    }


def prompt(seed: int, length: int = 6) -> list[int]:
    """Arbitrary token ids; the same seed gives the same prompt."""
    return [3 + (seed * 131 + i * i * 17 + i * 29) % 500 for i in range(length)]


def greedy(**options: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **options}


def sampled(seed: int | None, **options: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": seed, "max_tokens": 16, "ignore_eos": True, **options}


def kinds_of_sampling() -> dict[str, dict[str, Any]]:
    """One request for each kind of sampling parameters, of different lengths.

    vLLM's front end rejects min-p and logit bias under speculation.
    """
    some_stop = list(range(0, 512, 5))
    # The V2 runner takes up to 128.
    some_bad = [[token] for token in range(1, 512, 5)] + [[2, 4], [5, 7, 8]]
    return {
        "greedy": greedy(),
        "greedy, ends in a draft": greedy(max_tokens=3),
        "greedy, ends in a longer draft": greedy(max_tokens=6),
        "greedy, stop token": greedy(stop_token_ids=some_stop),
        "greedy, stop token, another": greedy(stop_token_ids=some_stop, max_tokens=20),
        "greedy, min tokens": greedy(stop_token_ids=some_stop, min_tokens=7),
        "greedy, repetition penalty": greedy(repetition_penalty=1.4),
        "greedy, frequency penalty": greedy(frequency_penalty=1.5),
        "greedy, presence penalty": greedy(presence_penalty=1.5),
        "greedy, bad words": greedy(bad_words_token_ids=some_bad),
        "greedy, allowed tokens": greedy(allowed_token_ids=list(range(100, 400))),
        "greedy, logprobs": greedy(logprobs=3),
        "greedy, logprob of the token": greedy(logprobs=0, max_tokens=9),
        "sampled": sampled(1),
        "sampled, cool": sampled(2, temperature=0.4),
        "sampled, hot": sampled(3, temperature=1.6),
        "sampled, no seed": sampled(None),
        "sampled, top-p": sampled(4, top_p=0.7),
        # vLLM's CPU sampler fails for top-k without top-p in a step without drafts.
        "sampled, top-k and top-p": sampled(5, top_k=6, top_p=0.9, temperature=0.8),
        "sampled, penalties": sampled(7, repetition_penalty=1.2, frequency_penalty=0.5),
        "sampled, bad words": sampled(8, bad_words_token_ids=some_bad),
        "sampled, logprobs": sampled(10, logprobs=2, temperature=0.7, top_p=0.8),
        "sampled, stop token": sampled(11, stop_token_ids=some_stop, max_tokens=20),
        "sampled, three answers": sampled(12, n=3, max_tokens=10),
        "sampled, ends in a draft": sampled(13, max_tokens=2),
    }


def every_kind(longest: int = 20) -> dict[str, Request]:
    """A request of every kind, with at most `longest` output tokens."""
    requests: dict[str, Request] = {}
    for i, (name, sampling) in enumerate(kinds_of_sampling().items()):
        limited = {**sampling, "max_tokens": min(longest, sampling["max_tokens"])}
        if "min_tokens" in limited:
            limited["min_tokens"] = min(limited["min_tokens"], longest - 1)
        requests[name] = (prompt(i), limited)
    return requests


def long_prompts(length: int, tokens: int, seed: int | None) -> dict[str, Request]:
    """Prompts that are too long for one step.

    vLLM's V1 on a CPU fails if it splits a prompt with a seed: torch's CPU generator has no offset.
    """
    kinds = {
        "greedy": greedy(max_tokens=tokens),
        "greedy with logprobs": greedy(max_tokens=tokens, logprobs=1),
        "sampled": sampled(seed, max_tokens=tokens),
        "sampled with top-p": sampled(seed, max_tokens=tokens, top_p=0.8),
    }
    return {
        f"{name}, long prompt": (prompt(40 + i, length), sampling)
        for i, (name, sampling) in enumerate(kinds.items())
    }


def stop_strings(tokens: int) -> dict[str, Request]:
    """Requests with stop strings; the tiny models' ids are letters and bytes of the tokenizer."""
    strings = ["a", "e", "o", "t", "n", "in", "th"]
    return {
        "greedy, stop string": (prompt(80), greedy(max_tokens=tokens, stop=strings)),
        "greedy, stop string in the output": (
            prompt(81),
            greedy(max_tokens=tokens, stop=strings, include_stop_str_in_output=True),
        ),
        "sampled, stop string": (prompt(82), sampled(30, max_tokens=tokens, stop=strings)),
    }


def crowded(count: int, prompt_length: int, tokens: int) -> dict[str, Request]:
    """Alternating greedy and sampled requests of equal length that together overflow the cache."""
    return {
        f"{'sampled' if i % 2 else 'greedy'} {i}": (
            prompt(60 + i, prompt_length),
            sampled(20 + i, max_tokens=tokens, logprobs=1, temperature=0.8)
            if i % 2
            else greedy(max_tokens=tokens, logprobs=1 if i % 4 else None),
        )
        for i in range(count)
    }


def run(
    speculative_config: dict[str, Any],
    batches: list[list[Request]],
    *,
    v2: bool = False,
    costs: dict[str, Any] | None = None,
    timeout: int = 500,
    **engine: Any,
) -> dict[str, Any]:
    """Answers the batches with one engine.

    Args:
        batches: the requests of each call of `generate`.
        v2: runs Model Runner V2 in Triton's interpreter.
        costs: see `adaptive.py`; None without adaptive verification.
        **engine: arguments of vLLM's LLM; at least `model`.

    Returns:
        The result of `engine_process.py`, and `log`, the process's output.
    """
    job = {
        "engine": {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "gpu_memory_utilization": 0.4,
            "max_model_len": 128,
            "speculative_config": speculative_config,
            **engine,
        },
        "batches": batches,
        "costs": costs,
        # The reference is vLLM's sampler with its CPU kernels fixed.
        "mend": not v2 and "rejection_sample_method" not in speculative_config,
    }
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    if v2:
        environment |= {"PYTHONPATH": str(INTERPRETED), "TRITON_INTERPRET": "1"}
    child = subprocess.run(
        [sys.executable, str(HERE / "engine_process.py")],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"{child.returncode}: {child.stdout[-3000:]}{child.stderr[-5000:]}"
    result = json.loads(lines[-1].removeprefix("RESULT "))
    result["log"] = child.stdout + child.stderr
    is_v2 = "vllm.v1.worker.gpu.model_runner" in result["runner"]
    assert is_v2 is v2, f"the wrong model runner: {result['runner']}"
    sampler = "RejectionSampler"
    if speculative_config.get("rejection_sample_method") == "mars":
        sampler = "MarsRejectionSamplerV2" if v2 else "MarsRejectionSampler"
    assert result["sampler"] == sampler
    return result


def accepted_share(result: dict[str, Any], batch: int) -> float:
    before = result["metrics"][batch - 1] if batch else {}

    def count(kind: str) -> float:
        name = f"vllm:spec_decode_num_{kind}_tokens"
        return result["metrics"][batch][name] - before.get(name, 0)

    assert count("draft") > 0
    return count("accepted") / count("draft")


# vLLM 0.32's `block` reuses random numbers in its next step, so sampled answers differ.
BY_BLOCKS = () if draws_anew() else ("sampled",)


def assert_same(names: list[str], vllms: list, mars: list) -> None:
    """Compares all that a client sees of a batch; logprobs up to rounding."""
    assert len(names) == len(vllms) == len(mars)
    for name, expected, answers in zip(names, vllms, mars, strict=True):
        for one, other in zip(expected, answers, strict=True):
            for key in ("tokens", "text", "finish_reason", "stop_reason"):
                assert other[key] == one[key], (name, key)
            assert (other["logprobs"] is None) == (one["logprobs"] is None), name
            for entries in zip(one["logprobs"] or [], other["logprobs"] or [], strict=True):
                for (token, rank, logprob), (token_2, rank_2, logprob_2) in zip(
                    *entries, strict=True
                ):
                    assert (token_2, rank_2) == (token, rank), name
                    assert math.isclose(logprob_2, logprob, abs_tol=1e-4), name


# Sampled requests whose probabilistic drafts MARS draws under parameters besides the temperature.
UNDER_PARAMETERS = "sampled, top-", "sampled, penalties", "sampled, logprobs", "sampled with top-p"


def assert_same_batches(
    batches: list[dict[str, Request]], vllms: dict, mars: dict, but: tuple[str, ...] = ()
) -> None:
    """Compares all answers of two engines, and their counters.

    Requests whose names start with a prefix in `but` are left out, and then the counters, too.
    """
    for requests, *results in zip(batches, vllms["batches"], mars["batches"], strict=True):
        compared = [name for name in requests if not name.startswith(but)]
        answers = [dict(zip(requests, result, strict=True)) for result in results]
        expected, actual = ([by_name[name] for name in compared] for by_name in answers)
        assert_same(compared, expected, actual)
    if but:
        return
    for one, other in zip(vllms["metrics"], mars["metrics"], strict=True):
        # MARS has additional counters.
        assert {name: other[name] for name in one} == one


def finish_reasons(result: dict[str, Any], batch: int) -> set[str]:
    return {one["finish_reason"] for answers in result["batches"][batch] for one in answers}
