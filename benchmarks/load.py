"""How the gain of speculation shrinks as load grows: measured, and beside it what a model predicts.

`python -m benchmarks.load --output benchmarks/results/load-cpu.json`

The model (docs/scale.md): a step that verifies n tokens takes T(n) = floor + slope * n. B requests
need T(B) for B tokens without speculation, and with it T(B * width) plus the drafting for B * L
tokens: width is K + 1 where every step drafts K, L the acceptance length. So the gain is
L * T(B) / (T(B * width) + drafting).

Two servers run side by side and answer the same prompts in turn, autoregressive, strict and MARS,
at each concurrency, so that what else the machine does meets all of them. floor and slope are
fitted to the autoregressive answers alone; of the others the prediction takes L and width only.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import openai

from vllm_mars.local.drafts import NGRAM_CONFIG
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import load_prompts
from vllm_mars.local.provenance import describe_run, vllm_device
from vllm_mars.local.scrape import ACCEPTED_TOKENS, DRAFT_TOKENS, DRAFTS, GENERATED_TOKENS
from vllm_mars.local.server import VllmServer

METRICS_SECONDS = 10.0
SPECULATION = {
    **NGRAM_CONFIG,
    "num_speculative_tokens": 4,
    "rejection_sample_method": "mars",
}
SERVERS: dict[str, dict[str, Any] | None] = {"autoregressive": None, "speculative": SPECULATION}
# Which server a mode asks, and the theta of its requests; theta 1 is vLLM's own verification.
MODES: dict[str, tuple[str, float | None]] = {
    "autoregressive": ("autoregressive", None),
    "strict": ("speculative", 1.0),
    "mars": ("speculative", 0.9),
}


@dataclass(frozen=True)
class StepTime:
    """T(n) = floor + slope * n, the seconds of a step that verifies n tokens.

    Attributes:
        floor: seconds that do not depend on n: weights are read once, work is launched.
        slope: seconds for each token more.
    """

    floor: float
    slope: float

    def __call__(self, tokens: float) -> float:
        """Seconds of a step with this many tokens."""
        return self.floor + self.slope * tokens

    def gain(self, batch: float, length: float, width: float, drafting: float = 0.0) -> float:
        """Speed with speculation over speed without.

        Args:
            batch: requests in a step, B.
            length: acceptance length L, the tokens that a request gains per step.
            width: tokens that are verified per request and step: K + 1 where every step drafts
                K, less where a request has no draft.
            drafting: seconds that a step spends on drafting.
        """
        return length * self(batch) / (self(batch * width) + drafting)

    def break_even(self, length: float, width: float, drafting: float = 0.0) -> float:
        """The batch at which the gain falls to 1; infinite where it never does.

        Args:
            length, width, drafting: as for `gain`.
        """
        rejected = width - length
        saved = (length - 1) * self.floor - drafting
        if rejected <= 0 or self.slope <= 0:
            return float("inf") if saved > 0 else 0.0
        return max(0.0, saved / (self.slope * rejected))


def fit(points: list[tuple[float, float]]) -> StepTime:
    """The line through (tokens, seconds) points with the least squares of relative errors."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, points, strict=True))
        / spread
    )
    return StepTime(mean_t - slope * mean_n, slope)


def measure(
    server: VllmServer, theta: float | None, prompts: list[str], concurrency: int, tokens: int
) -> dict[str, Any]:
    """Asks all prompts, so many at a time; returns time and counters.

    Args:
        server: running.
        theta: of the requests, or None on a server without MARS.
        prompts: one request each.
        concurrency: requests at a time.
        tokens: length of every answer, whatever the model would say.
    """
    body: dict[str, Any] = {"ignore_eos": True}
    if theta is not None:
        body["vllm_xargs"] = {"mars_theta": theta}
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)

    def ask(prompt: str) -> int:
        answer = client.chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=tokens,
            extra_body=body,
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    before = server.metrics()
    begin = time.perf_counter()
    with client, ThreadPoolExecutor(concurrency) as pool:
        generated = sum(pool.map(ask, prompts))
    seconds = time.perf_counter() - begin
    # The server counts a step after it has sent its tokens.
    deadline = time.monotonic() + METRICS_SECONDS
    while True:
        after = server.metrics()
        if after[GENERATED_TOKENS] - before[GENERATED_TOKENS] >= generated:
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server did not count all tokens within {METRICS_SECONDS} s.")
    delta = {
        name: after.get(key, 0.0) - before.get(key, 0.0)
        for name, key in {
            "steps": "vllm:iteration_tokens_total_count",
            "step_tokens": "vllm:iteration_tokens_total_sum",
            "drafts": DRAFTS,
            "draft_tokens": DRAFT_TOKENS,
            "accepted": ACCEPTED_TOKENS,
            "prompt_tokens": "vllm:prompt_tokens_total",
        }.items()
    }
    return {"seconds": seconds, "generated": generated, **delta}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Speeds, the fitted model, and its gains beside the measured ones."""
    by_cell: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault((row["mode"], row["concurrency"]), []).append(row)

    def median(cell: tuple[str, int], value: Any) -> float:
        return float(statistics.median(value(row) for row in by_cell[cell]))

    levels = sorted({concurrency for _, concurrency in by_cell})
    plain = {
        c: (
            median(("autoregressive", c), lambda r: r["generated"] / r["steps"]),
            median(("autoregressive", c), lambda r: r["seconds"] / r["steps"]),
        )
        for c in levels
    }
    step = fit(list(plain.values()))
    cells = []
    for mode in MODES:
        for c in levels if mode != "autoregressive" else ():
            # Per request and step: one token, plus what was drafted or accepted.
            share = [(r["generated"] - r["accepted"], r) for r in by_cell[mode, c]]
            length = statistics.median(r["generated"] / steps for steps, r in share)
            width = statistics.median(1 + r["draft_tokens"] / steps for steps, r in share)
            gains = [
                (row["generated"] / row["seconds"]) / (base["generated"] / base["seconds"])
                for row, base in zip(by_cell[mode, c], by_cell["autoregressive", c], strict=True)
            ]
            batch = plain[c][0]
            cells.append(
                {
                    "mode": mode,
                    "concurrency": c,
                    "length": length,
                    "width": width,
                    "measured_gains": gains,
                    "measured_gain": statistics.median(gains),
                    "predicted_gain": step.gain(batch, length, width),
                    "break_even_batch": step.break_even(length, width),
                }
            )
    return {
        "step_time": asdict(step),
        "autoregressive_steps": {
            str(c): {"tokens": n, "seconds": t} for c, (n, t) in plain.items()
        },
        "cells": cells,
    }


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=16, help="requests of a cell")
    parser.add_argument("--tokens", type=int, default=48, help="length of every answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file; default: standard output only")
    args = parser.parse_args()
    device, gpu = vllm_device()
    prompts = [prompt.turns[0] for prompt in load_prompts()][: args.prompts]
    common = ["--max-model-len", "1024", "--max-num-seqs", str(max(args.concurrency))]
    common += ["--no-enable-prefix-caching", "--served-model-name", "model"]
    if device == "cpu":
        common += ["--dtype", "float32", "--enforce-eager"]
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-mars-")))
        servers = {}
        for name, speculation in SERVERS.items():
            extra = ["--speculative-config", json.dumps(speculation)] if speculation else []
            server = VllmServer(
                ensure_model(), common + extra, log_path=logs / f"{name}.log", wait=False
            )
            servers[name] = stack.enter_context(server)
        for server in servers.values():
            server.wait_until_ready()
            measure(server, None, prompts[:1], 1, 8)
        for repeat in range(args.repeats):
            for concurrency in args.concurrency:
                for mode, (name, theta) in MODES.items():
                    row = measure(servers[name], theta, prompts, concurrency, args.tokens)
                    rows.append({"repeat": repeat, "concurrency": concurrency, "mode": mode, **row})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = {
        "schema": "vllm-mars/load/1",
        **describe_run(gpu),
        "options": {k: v for k, v in vars(args).items() if k != "output"},
        "speculation": SPECULATION,
        "modes": MODES,
        **summarise(rows),
        "raw": rows,
    }
    text = json.dumps(result, indent=1) + "\n"
    if args.output:
        args.output.write_text(text)
    print(json.dumps(result["cells"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
