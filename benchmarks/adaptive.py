"""What adaptive verification brings beside MARS: a simulation, on recorded steps.

    python -m benchmarks.adaptive record adaptive.jsonl.gz
    python -m benchmarks.adaptive simulate adaptive.jsonl.gz --figures adaptive.json

Recorded is, of each step of an answer at temperature 1, what vLLM's estimator reads of the drafts
and the chance that each token stays, strictly and by MARS's default. Simulated is vLLM's choice of
drafts for a batch of such requests (`adaptive_verification.py` of vLLM 0.33): of all drafts those
most likely to stay, as many as bring most tokens for what a step costs. The coefficients of its
estimator are fitted to all steps at once, not while serving.

What a step costs is made of the step times that docs/one-gpu.md has at commit 78154b8, at
temperature 1: by tokens those without drafts, and the longest with drafts less what the drafter
takes, which is the same for each token of a draft; straight lines between and beyond.
"""

import argparse
import gzip
import json
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.figures import SCHEMA, table_of
from benchmarks.text import ENV, SERVERS, token_ids
from vllm_mars.config import METHOD
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import speculative_config
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import load_prompts
from vllm_mars.local.provenance import describe_run, vllm_device
from vllm_mars.local.result_file import write_json
from vllm_mars.local.vllm_args import CPU_ENGINE_ARGS, CPU_ENV, MAX_MODEL_LEN

LONGEST, TOKENS, BATCH = 8, 96, 16
# What requests ask for.
SETTINGS: dict[str, dict[str, float]] = {
    "lossless": {"mars_max_loss": 0},
    "MARS": {"mars_max_loss": 0.02},
}
REQUESTS, DRAFTS = (1, 8, 32, 64), (4, 8)
# Simulated, of requests.
STEPS = 100_000
COLUMNS: list[list[str | None]] = [
    ["requests, K", ""],
    ["no drafts", ",.0f"],
    ["lossless", ",.0f"],
    ["lossless, adaptive", ",.0f"],
    ["MARS", ",.0f"],
    ["MARS, adaptive", ",.0f"],
    ["MARS / lossless, both adaptive", None],
    ["of drafts verified then", None],
]


class Measured(NamedTuple):
    """Milliseconds of a step by requests, without drafts, and strictly with drafts of a length.

    Attributes:
        added: by MARS, on the host.
    """

    alone: dict[int, float]
    length: int
    drafted: dict[int, float]
    added: dict[int, float]

    @property
    def draft_ms(self) -> float:
        """What one token of a draft takes, from a step of one request."""
        verified = np.interp(1 + self.length, [*self.alone], [*self.alone.values()])
        return float(self.drafted[1] - verified) / self.length

    def step_ms(self, tokens: np.ndarray, length: int) -> np.ndarray:
        """A step that verifies so many tokens, with drafts of a length."""
        most = max(self.drafted)
        points = {most * (1 + self.length): self.drafted[most] - self.length * self.draft_ms}
        sizes, times = map(np.array, zip(*(self.alone | points).items(), strict=True))
        beyond = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) * (tokens - sizes[-1])
        found: np.ndarray = np.interp(tokens, sizes, times) + np.maximum(beyond, 0)
        return found + length * self.draft_ms


# Of docs/one-gpu.md at commit 78154b8: an H200, commit 91a8d2b.
COSTS = {
    "Llama-3.1-8B's shape": Measured(
        {1: 5.17, 16: 5.70, 64: 7.13}, 3, {1: 6.84, 64: 13.46}, {1: 0.0, 64: 0.0}
    ),
    "SmolLM2-135M": Measured({1: 2.44, 64: 4.33}, 4, {1: 3.94, 64: 7.62}, {1: 0.94, 64: 1.09}),
}


def record(output: Path) -> None:
    """Answers the packaged prompts with the packaged model and head, and writes down the steps."""
    for name, value in (CPU_ENV | ENV).items():
        os.environ.setdefault(name, value)
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from vllm_mars.kernels import accept, clip, rule

    path = str(ensure_model())
    tokenizer = AutoTokenizer.from_pretrained(path)
    server = {**SERVERS[METHOD], "draft_sample_method": "probabilistic"}
    llm = LLM(
        path,
        speculative_config=speculative_config(str(PACKAGED_HEAD), LONGEST, **server),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=BATCH,
        disable_log_stats=False,
        **CPU_ENGINE_ARGS,
    )
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    drawn, verification = accept._drawn, runner.rejection_sampler.verification
    steps: dict[str, list[list[list[float]]]] = defaultdict(list)

    def note_and_draw(rows: Any, allowed: Any, name: Any, own: Any) -> Any:
        emitted = drawn(rows, allowed, name, own)
        drafts = rows.draft[own.begin : own.end]
        # Near the model's longest answer a draft is shorter.
        if len(drafts) == LONGEST:
            prices = rule.drawn_prices(rows, own.begin, own.end, allowed, LONGEST)
            reach, features, reaches = 1.0, [], []
            for i, (x, price) in enumerate(zip(drafts, prices, strict=True)):
                out, *buffers = own.p.new_empty((4, own.p.shape[1]))
                row = own.z[i], own.p[i], own.q[i], price, own.kept[i], out, buffers
                reach = rule.reach(reach, float(clip.clip_row(*row).m[x]), float(own.q[i, x]))
                most = float(own.q[i].max())
                # As vLLM's estimator limits it.
                features.append(min(math.log(most / max(1 - most, 1e-18)), 40.0))
                reaches.append(reach)
            request = verification.returned[-1].request_ids[own._place]
            steps[request].append([[round(it, 4) for it in of] for of in (features, reaches)])
        return emitted

    accept._drawn = note_and_draw
    _, gpu = vllm_device()
    lines: list[dict[str, Any]] = [{"run": describe_run(gpu)}]
    prompts = [{"prompt_token_ids": token_ids(tokenizer, it.turns[0])} for it in load_prompts()]
    for name, asked in SETTINGS.items():
        steps.clear()
        whole: dict[str, Any] = {"temperature": 1, "max_tokens": TOKENS, "ignore_eos": True}
        whole |= {"detokenize": False, "extra_args": {"mars_return": True, **asked}}
        params = [SamplingParams(seed=seed, **whole) for seed in range(len(prompts))]
        llm.generate(prompts, params, use_tqdm=False)
        lines.append({"name": name, "answers": list(steps.values())})
    output.write_bytes(gzip.compress("".join(json.dumps(it) + "\n" for it in lines).encode()))


class Recorded:
    """The steps of one setting: what the estimator predicts of each draft, and what is so.

    Args:
        answers: of each its steps, of each of these features and chances by position.
        length: of a draft, of which the first tokens count.
    """

    def __init__(self, answers: Sequence[Any], length: int) -> None:
        steps = [np.array(it)[:, :, :length] for it in answers]
        self.begins = np.cumsum([0, *map(len, steps)])
        features, self.reach = np.concatenate(steps).swapaxes(0, 1)
        before = np.pad(self.reach, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
        place = np.broadcast_to(np.eye(length), (len(features), length, length))
        x = np.concatenate([features[..., None], place], -1)
        # vLLM's start, then Newton's method; what is observed is reached.
        theta = np.array([0.5, *[-0.2] * length])
        for _ in range(20):
            predicted = 1 / (1 + np.exp(-x @ theta))
            weight = before * predicted * (1 - predicted)
            slope = np.einsum("nki,nk,nkj->ij", x, weight, x) + 1e-3 * np.eye(length + 1)
            residual = self.reach - before * predicted
            theta += np.linalg.solve(slope, np.einsum("nki,nk->i", x, residual))
        self.survival = np.cumprod(1 / (1 + np.exp(-x @ theta)), axis=1)


class Outcome(NamedTuple):
    """Of many steps: tokens for each millisecond, and the share of drafts that was verified."""

    speed: float
    admitted: float


def simulate(recorded: Recorded, requests: int, cost: np.ndarray, adapts: bool) -> Outcome:
    """Serves a batch in which a request begins another answer where one is at its end.

    Args:
        recorded: what the steps are.
        requests: in each step.
        cost: milliseconds of a step by the drafts that it verifies.
        adapts: whether only some are.
    """
    rng = np.random.default_rng(0)
    length, steps = recorded.reach.shape[1], STEPS // requests
    answers = rng.integers(len(recorded.begins) - 1, size=requests)
    at = rng.integers(recorded.begins[answers], recorded.begins[answers + 1])
    known, tokens, time, verified = np.ones((requests, length)), 0.0, 0.0, 0
    for _ in range(steps):
        survival, budget = recorded.survival[at], requests * length
        if adapts:
            # By what the host knows: the drafts of the step before.
            scores = np.sort(known.ravel())[::-1].cumsum()
            budget = int(np.argmax((requests + np.concatenate([[0], scores])) / cost))
        admitted = np.argsort(-survival.ravel(), kind="stable")[:budget]
        tokens += requests + recorded.reach[at].ravel()[admitted].sum()
        time, verified, known = time + cost[budget], verified + budget, survival
        at += 1
        ended = at == recorded.begins[answers + 1]
        answers[ended] = rng.integers(len(recorded.begins) - 1, size=ended.sum())
        at[ended] = recorded.begins[answers[ended]]
    return Outcome(tokens / time, verified / (steps * requests * length))


def table(lines: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """The rows of the table: tokens per second of a batch."""
    answers = {line["name"]: line["answers"] for line in lines}
    rows: list[list[Any]] = []
    for model, measured in COSTS.items():
        rows.append([f"{model}, tokens per second"])
        for requests in REQUESTS:
            alone = measured.step_ms(np.array([requests]), 0)
            for length in DRAFTS:
                cost = measured.step_ms(requests + np.arange(requests * length + 1), length)
                found = {}
                for name in SETTINGS:
                    recorded = Recorded(answers[name], length)
                    added = np.interp(requests, [*measured.added], [*measured.added.values()])
                    own = cost + added * (name == "MARS")
                    found[name] = [simulate(recorded, requests, own, it) for it in (False, True)]
                speeds = [1000 * it.speed for of in found.values() for it in of]
                of_strict, of_mars = (of[1] for of in found.values())
                ratio = of_mars.speed / of_strict.speed
                numbers = [float(requests / alone[0] * 1000), *speeds, ratio]
                shares = f"{of_strict.admitted:.0%}, {of_mars.admitted:.0%}"
                rows.append([f"{requests}, {length}", *(round(it, 4) for it in numbers), shares])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Records, or simulates."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["record", "simulate"])
    parser.add_argument("steps", type=Path)
    parser.add_argument("--figures", type=Path)
    args = parser.parse_args(arguments)
    if args.what == "record":
        record(args.steps)
        return
    first, *lines = map(json.loads, gzip.decompress(args.steps.read_bytes()).splitlines())
    rows = table(lines)
    print("\n".join(table_of(COLUMNS, rows)))
    if args.figures:
        run = {**first["run"], "raw": f"text/{args.steps.name}"}
        content = {"schema": SCHEMA, "columns": COLUMNS, "rows": rows, "runs": [run]}
        write_json(args.figures, content)


if __name__ == "__main__":
    main()
