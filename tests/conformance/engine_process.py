"""Runs an engine in a separate process: `python engine_process.py`, with a JSON job on stdin.

The job has `engine` (arguments of vLLM's LLM), `batches` (lists of `[prompt, sampling]`: token ids,
or text if the engine has a tokenizer, and SamplingParams as a dict), `mend` (whether to fix vLLM's
CPU kernels) and `costs` (of adaptive verification, or null). Prints a line that starts with RESULT:
the answers and counters of each batch, and counters of adaptive verification (see `adaptive.py`).
"""

import json
import os
import sys
from collections.abc import Iterable

# In this process, requests always enter the engine in the same step, so the random numbers that
# vLLM shares between requests are comparable.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def describe_worker(worker):
    """Runs in the worker: the classes that verify, and whether drafts are probabilistic."""
    runner = worker.model_runner
    # V2 only.
    draft_logits = getattr(getattr(runner, "speculator", None), "draft_logits", None)
    return {
        "runner": [base.__module__ for base in type(runner).__mro__],
        "sampler": type(runner.rejection_sampler).__qualname__,
        "has_draft_logits": draft_logits is not None,
    }


def mend_worker(worker):
    from vllm_on_cpu import mend

    mend()


def sampling_params(options, has_tokenizer):
    from vllm import SamplingParams

    options = dict(options)
    bad_words = options.pop("bad_words_token_ids", None)
    params = SamplingParams(detokenize=has_tokenizer, **options)
    # Only a tokenizer would set them.
    params._bad_words_token_ids = bad_words
    return params


def completion(output):
    """Everything in a completion that a client can see."""
    logprobs = None
    if output.logprobs is not None:
        logprobs = [
            sorted([token, entry.rank, entry.logprob] for token, entry in position.items())
            for position in output.logprobs
        ]
    return {
        "tokens": list(output.token_ids),
        "returned": getattr(output.spec_decode_metrics, "mars", None),
        "text": output.text,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def counters(metrics: Iterable) -> dict[str, float]:
    return {metric.name: metric.value for metric in metrics if hasattr(metric, "value")}


def main() -> None:
    from vllm import LLM

    job, intervals = json.load(sys.stdin), []
    if job["costs"]:
        from adaptive import allow

        intervals = allow(**job["costs"])
    llm = LLM(disable_log_stats=False, **job["engine"])
    has_tokenizer = not job["engine"].get("skip_tokenizer_init", False)
    try:
        (worker,) = llm.collective_rpc(describe_worker)
        if job["mend"]:
            llm.collective_rpc(mend_worker)
        batches, metrics = [], []
        for batch in job["batches"]:
            outputs = llm.generate(
                [
                    prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
                    for prompt, _ in batch
                ],
                [sampling_params(sampling, has_tokenizer) for _, sampling in batch],
                use_tqdm=False,
            )
            batches.append([[completion(one) for one in output.outputs] for output in outputs])
            metrics.append(counters(llm.get_metrics()))
    finally:
        llm.llm_engine.engine_core.shutdown()
    result = {**worker, "batches": batches, "metrics": metrics, "intervals": intervals}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
