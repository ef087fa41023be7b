"""Acceptance of a draft in a real vLLM engine, strict and relaxed, on the same prompts."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Speculative methods that take a directory, and n-grams.
Config = dict[str, Any]


def measure(
    model: Path,
    drafts: Config,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    theta: float,
    engine: Config | None = None,
) -> dict[str, Any]:
    """Answers the prompts one at a time at temperature 0, each strictly and relaxed.

    The engine runs in a process of its own, which ends with the call.

    Args:
        model: the target's directory.
        drafts: vLLM's speculative config, without the verification method.
        prompts: token ids.
        max_tokens: longest answer.
        theta: of the relaxed answers; 1.0 is strict.
        engine: further arguments of vLLM's `LLM`.

    Returns:
        `strict` and `relaxed`, each with `drafts`, `mean_acceptance_length`,
        `acceptance_by_position` (share of the drafts in which a position was accepted),
        `output_tokens`, `seconds` and `tokens` (the answers' ids).

    Raises:
        RuntimeError: the engine failed; the message holds the end of its output.
    """
    request = {
        "model": str(model),
        "drafts": drafts,
        "prompts": [list(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "theta": theta,
        "engine": engine or {},
    }
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.draft.engine"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-30:])
        raise RuntimeError(f"the engine with {drafts} failed:\n{tail}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    import time

    from vllm import LLM, SamplingParams

    llm = LLM(
        request["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={**request["drafts"], "rejection_sample_method": "mars"},
        **{"max_model_len": 2048, **request["engine"]},
    )
    eos = llm.model_config.hf_config.eos_token_id
    results = {}
    try:
        for name, theta in (("strict", 1.0), ("relaxed", request["theta"])):
            sampling = SamplingParams(
                temperature=0,
                max_tokens=request["max_tokens"],
                detokenize=False,
                stop_token_ids=[eos],
                extra_args={"mars_theta": theta},
            )
            before, start, tokens = _counters(llm), time.perf_counter(), []
            for prompt in request["prompts"]:
                outputs = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
                tokens.append(list(outputs[0].outputs[0].token_ids))
            seconds = time.perf_counter() - start
            drafts, *accepted = (
                now - then for now, then in zip(_counters(llm), before, strict=True)
            )
            results[name] = {
                "drafts": drafts,
                "mean_acceptance_length": round(1 + sum(accepted) / max(1, drafts), 4),
                "acceptance_by_position": [round(one / max(1, drafts), 4) for one in accepted],
                "output_tokens": sum(map(len, tokens)),
                "seconds": round(seconds, 2),
                "tokens": tokens,
            }
    finally:
        llm.llm_engine.engine_core.shutdown()
    return results


def _counters(llm: Any) -> list[int]:
    """Returns how often the engine drafted, then the accepted tokens of each position."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = metrics["vllm:spec_decode_num_drafts"].value
    return [drafts, *metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values]


if __name__ == "__main__":
    print(json.dumps(_serve(json.load(sys.stdin))))
