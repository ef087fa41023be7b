"""The requests that own and MARS engines answer, and how an engine is run on them."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INTERPRETED = HERE.parent / "interpreted"
STRICT = {"rejection_sample_method": "mars", "mars_theta": 1.0}
STRICT_PRICE = {"rejection_sample_method": "mars", "mars_price": 0.0}
# Above every difference of two logits of the tiny models.
RELAXED = {
    "rejection_sample_method": "mars",
    "mars_price": 1000.0,
    "mars_strict_opening": 0,
}

Request = tuple[list[int] | str, dict[str, Any]]


def draft_model(models: Path, **options: Any) -> dict[str, Any]:
    """A draft model whose drafts are drawn."""
    return {
        "method": "draft_model",
        "model": str(models / "draft"),
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
        **options,
    }


def eagle(models: Path, **options: Any) -> dict[str, Any]:
    head = str(models / "eagle")
    drafts = {"method": "eagle", "model": head, "num_speculative_tokens": 3}
    # As vLLM's own, which MARS is compared with.
    return {**drafts, "draft_sample_method": "greedy", **options}


def prompt(seed: int, length: int = 6) -> list[int]:
    """Token ids without a meaning; the same seed gives the same prompt."""
    return [3 + (seed * 131 + i * i * 17 + i * 29) % 500 for i in range(length)]


def greedy(**options: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **options}


def sampled(seed: int | None, **options: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": seed, "max_tokens": 16, "ignore_eos": True, **options}


def kinds_of_sampling() -> dict[str, dict[str, Any]]:
    """One request for each kind of sampling parameters; lengths differ, so the batch changes.

    vLLM's front end refuses min-p and logit bias under speculation.
    """
    some_stop = list(range(0, 512, 5))
    # The V2 runner takes 128 of them.
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
        # vLLM's CPU sampler ends in an error for top-k alone in a step without drafts.
        "sampled, top-k and top-p": sampled(5, top_k=6, top_p=0.9, temperature=0.8),
        "sampled, penalties": sampled(7, repetition_penalty=1.2, frequency_penalty=0.5),
        "sampled, bad words": sampled(8, bad_words_token_ids=some_bad),
        "sampled, logprobs": sampled(10, logprobs=2, temperature=0.7, top_p=0.8),
        "sampled, stop token": sampled(11, stop_token_ids=some_stop, max_tokens=20),
        "sampled, three answers": sampled(12, n=3, max_tokens=10),
        "sampled, ends in a draft": sampled(13, max_tokens=2),
    }


def every_kind(longest: int = 20) -> dict[str, Request]:
    """A request of every kind, with at most `longest` tokens to answer."""
    requests: dict[str, Request] = {}
    for i, (name, sampling) in enumerate(kinds_of_sampling().items()):
        limited = {**sampling, "max_tokens": min(longest, sampling["max_tokens"])}
        if "min_tokens" in limited:
            limited["min_tokens"] = min(limited["min_tokens"], longest - 1)
        requests[name] = (prompt(i), limited)
    return requests


def long_prompts(length: int, tokens: int, seed: int | None) -> dict[str, Request]:
    """Prompts that one step cannot take whole.

    Args:
        length: of each prompt.
        tokens: to answer.
        seed: of the sampled ones. vLLM's V1 runner on a CPU ends in an error where a prompt with a
            seed is cut (it asks torch's CPU generator for an offset); None gives them none.
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
    """Answers that end at a string; the tiny models' ids are letters and bytes of the tokenizer."""
    strings = ["a", "e", "o", "t", "n", "in", "th"]
    return {
        "greedy, stop string": (prompt(80), greedy(max_tokens=tokens, stop=strings)),
        "greedy, stop string kept": (
            prompt(81),
            greedy(max_tokens=tokens, stop=strings, include_stop_str_in_output=True),
        ),
        "sampled, stop string": (prompt(82), sampled(30, max_tokens=tokens, stop=strings)),
    }


def crowded(count: int, prompt_length: int, tokens: int) -> dict[str, Request]:
    """Requests of equal length, greedy and sampled by turns, that together overflow a cache."""
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
        speculative_config: vLLM's, with the options of MARS or without.
        batches: the requests of each call of `generate`.
        v2: whether Triton's interpreter, and with it Model Runner V2, is taken.
        costs: see `adaptive.py`; None without adaptive verification.
        timeout: seconds.
        **engine: further arguments of vLLM's LLM; `model` at least.

    Returns:
        The result that `engine_process.py` prints, and `log`: all that the process wrote.
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
        # vLLM's own sampler on a CPU is compared as mended.
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
    """Share of one batch's drafted tokens that was accepted."""
    before = result["metrics"][batch - 1] if batch else {}

    def count(what: str) -> float:
        name = f"vllm:spec_decode_num_{what}_tokens"
        return result["metrics"][batch][name] - before.get(name, 0)

    assert count("draft") > 0
    return count("accepted") / count("draft")


def assert_same(names: list[str], own: list, mars: list) -> None:
    """The answers of one batch: equal in all that a client sees, logprobs up to rounding."""
    assert len(names) == len(own) == len(mars)
    for name, expected, answers in zip(names, own, mars, strict=True):
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


# Sampled requests whose probabilistic drafts MARS draws under more than a temperature.
UNDER_PARAMETERS = "sampled, top-", "sampled, penalties", "sampled, logprobs", "sampled with top-p"


def assert_same_batches(
    batches: list[dict[str, Request]], own: dict, mars: dict, but: tuple[str, ...] = ()
) -> None:
    """All answers of two engines; and as many tokens drafted, accepted, cached and preempted.

    But those whose names begin with one of these, and then the numbers of tokens.
    """
    for requests, *both in zip(batches, own["batches"], mars["batches"], strict=True):
        compared = [name for name in requests if not name.startswith(but)]
        answers = [dict(zip(requests, of, strict=True)) for of in both]
        assert_same(compared, *([of[name] for name in compared] for of in answers))
    if but:
        return
    for one, other in zip(own["metrics"], mars["metrics"], strict=True):
        # MARS counts some things of its own besides.
        assert {name: other[name] for name in one} == one


def finish_reasons(result: dict[str, Any], batch: int) -> set[str]:
    return {one["finish_reason"] for answers in result["batches"][batch] for one in answers}
