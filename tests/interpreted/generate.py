"""Runs one engine in a process of its own: `python generate.py JSON`; prints a JSON line.

The argument gives `model`, `speculative_config`, `prompts` (token ids), `sampling` (one dict of
SamplingParams for each prompt) and `engine` (further options of the engine).
"""

import json
import sys


def look_at_worker(worker):
    """Runs in the worker: the classes that really verify."""
    runner = worker.model_runner
    return {
        "runner": [base.__module__ for base in type(runner).__mro__],
        "sampler": type(runner.rejection_sampler).__qualname__,
    }


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(sys.argv[1])
    llm = LLM(
        job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        disable_log_stats=False,
        speculative_config=job["speculative_config"],
        **{"max_num_seqs": 4, **job["engine"]},
    )
    try:
        (worker,) = llm.collective_rpc(look_at_worker)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
            [SamplingParams(detokenize=False, **sampling) for sampling in job["sampling"]],
            use_tqdm=False,
        )
        metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        answers = [output.outputs[0] for output in outputs]
    finally:
        llm.llm_engine.engine_core.shutdown()
    result = {
        **worker,
        "tokens": [list(answer.token_ids) for answer in answers],
        "returned": [
            answer.spec_decode_metrics and answer.spec_decode_metrics.to_dict()["mars"]
            for answer in answers
        ],
        "drafted": metrics.get("vllm:spec_decode_num_draft_tokens"),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens"),
        "preemptions": metrics.get("vllm:num_preemptions"),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
