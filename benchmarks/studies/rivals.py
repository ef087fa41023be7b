"""Published rules for probabilistic drafts on the same recorded rows, at the same mean KL.

    python -m benchmarks.studies.rivals --prompts questions.jsonl

Rows are those that nearly strict answers visit (a bound of 1e-6 nats, so drafts are drawn at 0.8 of
the temperature, as by default). Of each rule: what it accepts at a position on average, over strict
verification, where its mean KL(m || p) is 0.01, 0.02 and 0.05.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from vllm_mars.kernels import cpu
from vllm_mars.kernels.clip import clip_row
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import speculative_config
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import load_prompts
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.vllm_args import CPU_ENGINE_ARGS, CPU_ENV

Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NONE = torch.tensor([], dtype=torch.int64)


def record(prompts: Path, most: int) -> list[Row]:
    """Logits, p and q of visited positions."""
    for name, value in (CPU_ENV | {"VLLM_CPU_KVCACHE_SPACE": "1"}).items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    rows: list[Row] = []
    own = cpu.clip_row

    def note(logits: torch.Tensor, p: torch.Tensor, q: torch.Tensor, *rest: object) -> object:
        if len(rows) < most:
            rows.append((logits.clone(), p.clone(), q.clone()))
        return own(logits, p, q, *rest)

    cpu.clip_row = note
    config = {
        "rejection_sample_method": "mars",
        "mars_max_loss": 1e-6,
        "mars_draft_temperature": 0.8,
    }
    config |= {"draft_sample_method": "probabilistic", "mars_strict_opening": 0}
    llm = LLM(
        str(ensure_model()),
        speculative_config=speculative_config(str(PACKAGED_HEAD), 4, **config),
        max_model_len=1024,
        max_num_seqs=16,
        **CPU_ENGINE_ARGS,
    )
    turns = [[{"role": "user", "content": it.turns[0]}] for it in load_prompts(prompts)]
    whole = SamplingParams(temperature=1, seed=0, max_tokens=48, top_p=1.0, top_k=0)
    llm.chat(turns[::3][:33], whole, use_tqdm=False)
    return rows


def kl(m: torch.Tensor, p: torch.Tensor) -> float:
    return float(torch.special.xlogy(m, m / p.clamp(min=1e-300)).sum())


def clipped(row: Row, price: float) -> torch.Tensor:
    logits, p, q = row
    return clip_row(logits, p, q, price, NONE, logits.new_empty(4, len(p))).m.double().clone()


def budget(row: Row, most: float) -> torch.Tensor:
    """The clip whose own KL is `most`, or the largest there is."""
    low, high = 0.0, 30.0
    if kl(clipped(row, high), row[1].double()) <= most:
        return clipped(row, high)
    for _ in range(18):
        middle = (low + high) / 2
        fits = kl(clipped(row, middle), row[1].double()) <= most
        low, high = (middle, high) if fits else (low, middle)
    return clipped(row, low)


def lenient(row: Row, lenience: float) -> torch.Tensor:
    """Accepts with min(1, p / (l q)), and draws from the strict rest else."""
    _, p, q = (it.double() for it in row)
    accepted, rest = torch.minimum(q, p / lenience), (p - q).clamp(min=0)
    return accepted + (1 - accepted.sum()) * rest / rest.sum().clamp(min=1e-300)


def mixed(row: Row, share: float) -> torch.Tensor:
    _, p, q = (it.double() for it in row)
    return (1 - share) * p + share * torch.where(p > 0, q, 0)


RULES: dict[str, tuple[Callable[[Row, float], torch.Tensor], list[float]]] = {
    "price (MARS)": (clipped, [0.2, 0.35, 0.5, 0.7, 0.9, 1.2, 1.6]),
    "a fixed KL budget at each position (mentored decoding)": (
        budget,
        [0.005, 0.012, 0.02, 0.035, 0.06, 0.1, 0.2],
    ),
    "lenience": (lenient, [0.9, 0.8, 0.7, 0.55, 0.4, 0.25]),
    "mixing with the draft": (mixed, [0.03, 0.08, 0.15, 0.25, 0.4]),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=300)
    args = parser.parse_args()
    rows = record(args.prompts, args.rows)
    torch.set_num_threads(1)
    strict = np.array([float(torch.minimum(p, q).sum()) for _, p, q in rows])
    print(json.dumps(describe_run(None)))
    print(f"{len(rows)} rows, strict acceptance {strict.mean():.4f}", flush=True)
    for name, (rule, values) in RULES.items():
        gains, losses = [np.zeros(len(rows))], [np.zeros(len(rows))]
        for value in values:
            ms = [rule(row, value) for row in rows]
            gains.append(
                np.array(
                    [
                        float(torch.minimum(m, row[2].double()).sum())
                        for m, row in zip(ms, rows, strict=True)
                    ]
                )
                - strict
            )
            losses.append(
                np.array([kl(m, row[1].double()) for m, row in zip(ms, rows, strict=True)])
            )
        at, rng = (0.01, 0.02, 0.05), np.random.default_rng(0)

        def read(index: np.ndarray) -> list[float]:
            own = [loss[index].mean() for loss in losses], [gain[index].mean() for gain in gains]
            return [100 * float(np.interp(it, *own)) / strict[index].mean() for it in at]

        found = read(np.arange(len(rows)))
        draws = np.array([read(rng.integers(0, len(rows), len(rows))) for _ in range(500)])
        low, high = np.percentile(draws, [2.5, 97.5], axis=0)
        print(
            name,
            [f"{v:.1f} ({a:.1f} to {b:.1f})" for v, a, b in zip(found, low, high, strict=True)],
            [round(x.mean(), 4) for x in losses],
            flush=True,
        )


if __name__ == "__main__":
    main()
