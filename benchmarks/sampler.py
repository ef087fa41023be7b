"""Cost of one verification step on a CPU: vLLM's V1 rejection sampler beside MARS.

`python -m benchmarks.sampler --output build/sampler.json`

Both verify the same logits and drafts in turn, so that a drift of the machine's speed meets both;
ratios are taken pair by pair. Drafts are the target's first choice with probability 0.6, else its
second or third, which is about what a draft model does.
"""

import argparse
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.figures import SCHEMA
from benchmarks.kernel_step import HostClock, Shape, Step, summary, time_in_turn, v1_inputs
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import write_json

NUM_DRAFT_TOKENS = 4
VOCAB = 49_152
# In nats per token gained, and per token of an answer.
PRICE, MAX_LOSS = 0.3, 0.02
# How many tokens each answer has by then, for the guard against repetition.
ANSWER = 512
BATCHES = (1, 32)
# Name, temperature, top-p.
REQUESTS = (
    ("greedy", 0.0, None),
    ("temperature 0.8", 0.8, None),
    ("temperature 0.8, top-p 0.9", 0.8, 0.9),
)


def samplers() -> dict[str, Any]:
    """vLLM's sampler, and MARS with a price: alone, and with a bound that sets it and the guard."""
    from vllm import SamplingParams
    from vllm.platforms import current_platform
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    from vllm_mars import MarsConfig, MarsRejectionSampler
    from vllm_mars.kernels import cpu
    from vllm_mars.runner.counters import CounterLayout, Counters
    from vllm_mars.runner.cpu_kernels import mend
    from vllm_mars.runner.requests_v1 import RequestsV1
    from vllm_mars.runner.verification import Verification

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    mend()
    device, most = torch.device("cpu"), max(BATCHES)

    def sampler(config: MarsConfig) -> MarsRejectionSampler:
        counters = Counters(CounterLayout(NUM_DRAFT_TOKENS), device)
        verification = Verification(config, [0, 1, 2], counters, cpu)
        requests = RequestsV1(config, most, 2 * ANSWER)
        return MarsRejectionSampler(Sampler(), None, device, verification, requests)

    mars = sampler(MarsConfig(price=PRICE, repeat_guard=0))
    everything = sampler(MarsConfig(max_loss=MAX_LOSS))
    answers = torch.randint(VOCAB, (most, ANSWER)).tolist()
    added = [(place, SamplingParams(), None, answer) for place, answer in enumerate(answers)]
    everything.requests.update_state(BatchUpdate(most, removed=[], added=added, moved=[]))
    vllm = RejectionSampler(Sampler(), None, device)
    return {"vllm": vllm, "mars": mars, "everything": everything}


def measure(runs: int) -> list[dict[str, Any]]:
    """Microseconds of a step of each batch and kind of requests, and ratios to vLLM's."""
    found, results = samplers(), []
    for batch in BATCHES:
        step = Step(Shape(batch, NUM_DRAFT_TOKENS, VOCAB, "fp32"), torch.device("cpu"))
        for name, temperature, top_p in REQUESTS:
            metadata, sampling = v1_inputs(step, temperature, top_p)
            calls = {
                key: functools.partial(sampler, metadata, None, step.logits, sampling)
                for key, sampler in found.items()
            }
            times = time_in_turn(HostClock(), calls, runs)
            result: dict[str, Any] = {"batch": batch, "requests": name}
            for key, of in times.items():
                ratio = round(float(np.median(np.divide(of, times["vllm"]))), 3)
                result[key] = {**summary(of), "x_vllm": ratio, "runs": of}
            results.append(result)
            shown = (f"{key} {result[key]['median'] / 1e3:.2f} ms" for key in times)
            print(f"{batch} {name}:", ", ".join(shown), flush=True)
    return results


def as_figures(run: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """A file of figures (`benchmarks.figures`), with the times of each run."""
    both = [(key, f"{key} / vLLM") for key in ("mars", "everything")]
    columns = ["vllm", *itertools.chain.from_iterable(both)]
    rows = []
    for of in results:
        row = [f"{of['batch']}, {of['requests']}", of["vllm"]["median"] / 1e3]
        for key, _ in both:
            row += [of[key]["median"] / 1e3, of[key]["x_vllm"]]
        rows.append(row)
    return {
        "schema": SCHEMA,
        "raw_files_at": run["git_commit"],
        "columns": [["requests", ""], *([name, ".2f"] for name in columns)],
        "rows": rows,
        "runs": [{"raw": "this file", **run}],
        "results": results,
    }


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=40, help="counted runs of each variant")
    parser.add_argument("--output", type=Path, help="JSON file; default: standard output only")
    args = parser.parse_args()
    config = {"k": NUM_DRAFT_TOKENS, "vocab": VOCAB, "price": PRICE, "dtype": "float32"}
    config |= {"max_loss": MAX_LOSS, "answer_tokens": ANSWER, "threads": torch.get_num_threads()}
    run = {**describe_run(None), "config": config}
    result = as_figures(run, measure(args.runs))
    if args.output:
        write_json(args.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
