"""Cost of one verification step on a CPU: vLLM's V1 rejection sampler against MARS.

`python -m benchmarks.sampler --output benchmarks/results/sampler-cpu.json`

Both samplers verify the same logits and drafts in turn, A B A B ..., so a drift of the machine's
speed meets both; the ratio is taken pair by pair. Drafts are the target's first choice with
probability 0.6, else its second or third, which is about what a draft model does. The second part
times the ways to reduce the rows that the torch backend could take.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import write_json

NUM_DRAFT_TOKENS = 4
VOCAB = 49_152
THETA = 0.9
# The guard against repetition, and how many tokens each answer has by then.
NGRAM = 4
ANSWER = 512


def time_in_turn(
    variants: dict[str, Callable[[], object]], runs: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Runs the variants in turn and returns the seconds of each counted run."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for run in range(warmup + runs):
        for name, function in variants.items():
            start = time.perf_counter()
            function()
            elapsed = time.perf_counter() - start
            if run >= warmup:
                seconds[name].append(elapsed)
    return seconds


def summary(seconds: list[float]) -> dict[str, Any]:
    """Median, 20th and 80th percentile in milliseconds, with the raw runs."""
    ordered = sorted(seconds)
    return {
        "median_ms": statistics.median(ordered) * 1e3,
        "p20_ms": ordered[int(0.2 * (len(ordered) - 1))] * 1e3,
        "p80_ms": ordered[int(0.8 * (len(ordered) - 1))] * 1e3,
        "runs_ms": [value * 1e3 for value in seconds],
    }


def step(batch: int, temperature: float, top_p: float | None) -> tuple[Any, torch.Tensor, Any]:
    """One step's metadata, raw logits `[batch * (K + 1), vocab]` and sampling metadata."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    torch.manual_seed(0)
    rows = batch * (NUM_DRAFT_TOKENS + 1)
    logits = torch.randn(rows, VOCAB) * 3
    metadata = SpecDecodeMetadata.make_dummy([[0] * NUM_DRAFT_TOKENS] * batch, logits.device)
    is_bonus = torch.arange(rows) % (NUM_DRAFT_TOKENS + 1) == NUM_DRAFT_TOKENS
    metadata.bonus_logits_indices = is_bonus.nonzero().squeeze(1).int()
    metadata.target_logits_indices = (~is_bonus).nonzero().squeeze(1).int()
    best = logits[metadata.target_logits_indices].topk(3).indices
    rank = torch.multinomial(torch.tensor([0.6, 0.25, 0.15]), len(best), replacement=True)
    metadata.draft_token_ids = best.gather(1, rank[:, None]).squeeze(1).int()
    greedy = temperature == 0
    neutral = torch.zeros(batch)
    return (
        metadata,
        logits,
        SamplingMetadata(
            temperature=None if greedy else torch.full((batch,), temperature),
            all_greedy=greedy,
            all_random=not greedy,
            top_p=None if top_p is None else torch.full((batch,), top_p),
            top_k=None,
            generators={},
            max_num_logprobs=None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=neutral,
            presence_penalties=neutral,
            repetition_penalties=neutral,
            output_token_ids=[[] for _ in range(batch)],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        ),
    )


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
            metadata, logits, sampling = step(batch, temperature, top_p)

            seconds = time_in_turn(
                {
                    key: functools.partial(sampler, metadata, None, logits, sampling)
                    for key, sampler in samplers.items()
                },
                runs,
            )
            ratios = [m / v for m, v in zip(seconds["mars"], seconds["vllm"], strict=True)]
            counting_adds, guard_adds = (
                [s - m for s, m in zip(seconds[key], seconds["mars"], strict=True)]
                for key in ("mars_counting", "mars_guarded")
            )
            results.append(
                {
                    "batch": batch,
                    "requests": name,
                    **{key: summary(values) for key, values in seconds.items()},
                    "median_ratio_mars_to_vllm": statistics.median(ratios),
                    "median_ms_counting_adds": statistics.median(counting_adds) * 1e3,
                    "median_ms_guard_adds": statistics.median(guard_adds) * 1e3,
                }
            )
    return results


def measure_reductions(runs: int) -> dict[str, Any]:
    """Ways to find the argmax and the runner-up of 160 rows of 49,152 float32 logits."""
    torch.manual_seed(0)
    logits = torch.randn(160, VOCAB) * 3
    draft_logits = logits[:, 0].clone()

    rows = logits.numpy()

    def count_all_rows() -> None:
        rows.argmax(axis=-1)
        np.count_nonzero(rows > draft_logits[:, None].numpy(), axis=-1)

    def count_candidates() -> None:
        # One row in ten, those whose draft passes the margin without being the argmax.
        rows.argmax(axis=-1)
        for row, pivot in zip(rows[::10], draft_logits[::10].numpy(), strict=True):
            np.count_nonzero(row > pivot)

    def torch_count_all_rows() -> None:
        logits.max(dim=-1)
        (logits > draft_logits[:, None]).sum(-1)

    seconds = time_in_turn(
        {
            "torch: top-2": lambda: logits.topk(2, dim=-1),
            "torch: max and argmax": lambda: logits.max(dim=-1),
            "torch: max, argmax and a count over all rows": torch_count_all_rows,
            "NumPy: argmax": lambda: rows.argmax(axis=-1),
            "NumPy: argmax and a count over all rows": count_all_rows,
            "NumPy: argmax and a count over candidate rows (used)": count_candidates,
        },
        runs,
    )
    return {name: summary(values) for name, values in seconds.items()}


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
        "reductions_160_rows": measure_reductions(args.runs),
    }
    for row in result["samplers"]:
        print(
            f"batch {row['batch']:>2}, {row['requests']:<27}"
            f" vLLM {row['vllm']['median_ms']:8.2f} ms   MARS {row['mars']['median_ms']:8.2f} ms"
            f"   ratio {row['median_ratio_mars_to_vllm']:.2f}"
            f"   counting adds {row['median_ms_counting_adds']:.2f} ms"
            f"   guard adds {row['median_ms_guard_adds']:.2f} ms"
        )
    for name, values in result["reductions_160_rows"].items():
        print(f"{name:<53} {values['median_ms']:8.2f} ms")
    if args.output:
        write_json(args.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
