"""Cost of one verification step on a CPU: vLLM's V1 rejection sampler against MARS.

`python -m benchmarks.sampler --output benchmarks/results/sampler-cpu.json`

Both samplers verify the same logits and drafts in turn, so a drift of the machine's speed meets
both; the ratio is taken pair by pair. Drafts are the target's first choice with probability 0.6,
else its second or third, which is about what a draft model does.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernel_timing import HostClock, summary, time_in_turn
from benchmarks.kernel_variants import Shape, Step, v1_inputs
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import write_json

NUM_DRAFT_TOKENS = 4
VOCAB = 49_152
THETA = 0.9
# The guard against repetition, and how many tokens each answer has by then.
NGRAM = 4
ANSWER = 512


def in_milliseconds(runs: list[float]) -> dict[str, Any]:
    """Median, 20th and 80th percentile, with the raw runs, of runs in microseconds."""
    found = summary([run / 1e3 for run in runs])
    return {f"{name}_ms": value for name, value in found.items()}


def measure_samplers(runs: int) -> list[dict[str, Any]]:
    """vLLM's sampler against MARS at theta 0.9, with a server's counters, and with the guard."""
    from vllm import SamplingParams
    from vllm.platforms import current_platform
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    from vllm_mars import MarsConfig, MarsRejectionSampler
    from vllm_mars.runner.counters import CounterLayout, Counters
    from vllm_mars.runner.cpu_kernels import mend
    from vllm_mars.runner.requests_v1 import RequestsV1

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    mend()
    device = torch.device("cpu")
    plain = MarsConfig(theta=THETA)
    mars, counting, guarded = (
        MarsRejectionSampler(
            Sampler(), None, device, config, [0, 1, 2], RequestsV1(config, 32, device)
        )
        for config in (plain, plain, MarsConfig(theta=THETA, repeat_guard=NGRAM))
    )
    answers = torch.randint(VOCAB, (32, ANSWER)).tolist()
    added = [(place, SamplingParams(), None, answer) for place, answer in enumerate(answers)]
    guarded.requests.update_state(BatchUpdate(32, removed=[], added=added, moved=[]))
    counting.rule.counters = Counters(CounterLayout(NUM_DRAFT_TOKENS), device)
    samplers = {
        "vllm": RejectionSampler(Sampler(), None, device),
        "mars": mars,
        "mars_counting": counting,
        "mars_guarded": guarded,
    }
    results = []
    for batch in (1, 32):
        for name, temperature, top_p in (
            ("greedy", 0.0, None),
            ("temperature 0.8", 0.8, None),
            ("temperature 0.8, top-p 0.9", 0.8, 0.9),
        ):
            step = Step(Shape(batch, NUM_DRAFT_TOKENS, VOCAB, "fp32"), device)
            metadata, sampling = v1_inputs(step, temperature, top_p)
            times = time_in_turn(
                HostClock(),
                {
                    key: functools.partial(sampler, metadata, None, step.logits, sampling)
                    for key, sampler in samplers.items()
                },
                runs,
            )
            of = {key: np.array(values) for key, values in times.items()}
            results.append(
                {
                    "batch": batch,
                    "requests": name,
                    **{key: in_milliseconds(values) for key, values in times.items()},
                    "median_ratio_mars_to_vllm": float(np.median(of["mars"] / of["vllm"])),
                    "median_ms_counting_adds": float(np.median(of["mars_counting"] - of["mars"]))
                    / 1e3,
                    "median_ms_guard_adds": float(np.median(of["mars_guarded"] - of["mars"])) / 1e3,
                }
            )
    return results


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=40, help="counted runs of each variant")
    parser.add_argument("--output", type=Path, help="JSON file; default: standard output only")
    args = parser.parse_args()
    result = {
        "schema": "vllm-mars/sampler-cpu/1",
        **describe_run(None),
        "config": {
            **{"k": NUM_DRAFT_TOKENS, "vocab": VOCAB, "theta": THETA, "dtype": "float32"},
            **{"repeat_guard": NGRAM, "answer_tokens": ANSWER},
        },
        "threads": torch.get_num_threads(),
        "samplers": measure_samplers(args.runs),
    }
    for row in result["samplers"]:
        print(
            f"batch {row['batch']:>2}, {row['requests']:<27}"
            f" vLLM {row['vllm']['median_ms']:8.2f} ms   MARS {row['mars']['median_ms']:8.2f} ms"
            f"   ratio {row['median_ratio_mars_to_vllm']:.2f}"
            f"   counting adds {row['median_ms_counting_adds']:.2f} ms"
            f"   guard adds {row['median_ms_guard_adds']:.2f} ms"
        )
    if args.output:
        write_json(args.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
