"""Runs one engine in a process of its own: `python engine_process.py`, a job as JSON on stdin.

The job gives `engine` (arguments of vLLM's LLM), `batches` (each a list of `[prompt, sampling]`:
token ids, or a text where the engine has a tokenizer, and SamplingParams as a dict), `mend`
(whether vLLM's CPU kernels are mended) and `costs` (what adaptive verification reckons with, or
none). Prints one line that starts with RESULT: the answers of each batch, the counters after it,
and what adaptive verification did (see `adaptive.py`).
"""

import json
import os
import sys
from collections.abc import Iterable

# The engine runs in this process, so requests enter it in the same step in each run: the random
# numbers that vLLM shares between requests are then comparable too.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def look_at_worker(worker):
    """Runs in the worker: the classes that really verify, and what they meet."""
    runner = worker.model_runner
    # V2 only: what probabilistic drafts are verified with.
    draft_logits = getattr(getattr(runner, "speculator", None), "draft_logits", None)
    return {
        "runner": [base.__module__ for base in type(runner).__mro__],
        "sampler": type(runner.rejection_sampler).__qualname__,
        "has_draft_logits": draft_logits is not None,
    }


def mend_worker(worker):
    from vllm_on_cpu import mend

    mend()


def sampling_params(given, has_tokenizer):
    from vllm import SamplingParams

    given = dict(given)
    bad_words = given.pop("bad_words_token_ids", None)
    params = SamplingParams(detokenize=has_tokenizer, **given)
    # Without a tokenizer nothing else can set them.
    params._bad_words_token_ids = bad_words
    return params


def completion(output):
    """What a client can tell two completions apart by."""
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

    job, rounds = json.load(sys.stdin), []
    if job["costs"]:
        from adaptive import allow

        rounds = allow(**job["costs"])
    llm = LLM(disable_log_stats=False, **job["engine"])
    has_tokenizer = not job["engine"].get("skip_tokenizer_init", False)
    try:
        (worker,) = llm.collective_rpc(look_at_worker)
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
    told = {"batches": batches, "metrics": metrics, "rounds": rounds}
    print("RESULT " + json.dumps({**worker, **told}))


if __name__ == "__main__":
    main()
