"""Compares rules of acceptance on recorded steps, without sampling noise.

    python -m benchmarks.rules record PROMPTS.jsonl --length 4 --output build/head-4.npz
    python -m benchmarks.rules compare build/head-4.npz --output benchmarks/results/rules-cpu.json

`record` serves prompts strictly, as vLLM does by default, and keeps the target's probability of
each draft token, also behind the first rejection. A rule accepts a draft token of probability p
with probability a >= p, and draws from the target without that token otherwise. So a position's
loss is KL((a, 1 - a) || (p, 1 - p)) in nats, and each step has a known expectation of tokens and of
loss. `compare` gives each rule the value with which it loses as much per token as the others. The
texts are those of strict verification: how a rule changes the text that follows is not in it.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import speculative_config
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import load_prompts
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import write_json

LOSSES = (0.02, 0.05, 0.1)
# Above any value that is looked for.
MOST_VALUE = 30.0
HALVINGS = 60


class Steps(NamedTuple):
    """Draft positions, `[steps, longest draft]` float64, 0 behind a draft's end.

    Attributes:
        p: the target's probability of the draft token.
        z, z1, z2: its processed logit, and the two largest of the row.
    """

    p: np.ndarray
    z: np.ndarray
    z1: np.ndarray
    z2: np.ndarray


def tilt(p: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The acceptance with a bias on the draft token's logit."""
    # In this form 1 stays 1.
    accept: np.ndarray = 1 - (1 - p) / (1 + p * np.expm1(bias))
    return accept


def look_ahead(steps: Steps, price: float) -> np.ndarray:
    """The acceptance with the bias `price` and what the rest of the draft is worth."""
    accept, worth = np.zeros_like(steps.p), np.zeros(len(steps.p))
    for i in reversed(range(steps.p.shape[1])):
        accept[:, i] = tilt(steps.p[:, i], price + worth)
        worth = np.log1p(steps.p[:, i] * np.expm1(price + worth))
    return accept


def ratio(steps: Steps, theta: float) -> np.ndarray:
    """The acceptance of arXiv 2601.15498: one of the two largest, where they are near."""
    near = (steps.z >= steps.z2) & (steps.z1 > 0) & (steps.z2 > theta * steps.z1)
    return np.where(near, 1.0, steps.p)


# The acceptance for a value, and the value for a number from 0 upwards; 0 is strict.
RULES: dict[str, tuple[Callable[[Steps, float], np.ndarray], Callable[[float], float]]] = {
    "look-ahead": (look_ahead, float),
    "no look-ahead": (lambda steps, price: tilt(steps.p, np.asarray(price)), float),
    # arXiv 2604.04987.
    "Cactus": (lambda s, delta: np.minimum(1, s.p + np.sqrt(2 * delta * s.p * (1 - s.p))), float),
    # arXiv 2211.17192.
    "lenience": (lambda steps, share: np.minimum(1, steps.p / share), lambda v: np.exp(-v)),
    # SGLang's --speculative-accept-threshold-single.
    "threshold": (lambda s, least: np.where(s.p >= least, 1.0, s.p), lambda v: np.exp(-v)),
    # A masked token stays masked, and there is none behind a draft's end.
    "mixing": (lambda s, w: np.where(s.p > 0, s.p + w * (1 - s.p), 0), lambda v: -np.expm1(-v)),
    "ratio": (ratio, lambda v: np.exp(-v)),
}


def expect(p: np.ndarray, accept: np.ndarray) -> tuple[float, float]:
    """The expected tokens per step, and the expected loss per token in nats."""
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.where(accept > 0, accept * np.log(accept / p), 0.0)
        loss += np.where(accept < 1, (1 - accept) * np.log((1 - accept) / (1 - p)), 0.0)
    reached = np.cumprod(np.column_stack([np.ones(len(p)), accept]), 1)
    tokens = reached.sum(1).mean()
    return float(tokens), float((reached[:, :-1] * loss).sum(1).mean() / tokens)


def at_loss(name: str, steps: Steps, wanted: float) -> tuple[float, float]:
    """The value with which a rule loses what is wanted, and its tokens per step.

    A rule that jumps over it takes the two values around it by turns.
    """
    accept, value_of = RULES[name]
    low, high = 0.0, MOST_VALUE
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_less = expect(steps.p, accept(steps, value_of(middle)))[1] < wanted
        low, high = (middle, high) if is_less else (low, middle)
    ends = [expect(steps.p, accept(steps, value_of(value))) for value in (low, high)]
    tokens, losses = zip(*ends, strict=True)
    return float(value_of(high)), float(np.interp(wanted, losses, tokens))


def load(path: Path) -> tuple[Steps, dict[str, Any]]:
    """The steps of a recorded file, and what it says of them."""
    with np.load(path) as file:
        in_draft = np.arange(file["length"].max()) < file["length"][:, None]
        rows = [np.zeros(in_draft.shape) for _ in Steps._fields]
        for row, name in zip(rows, Steps._fields, strict=True):
            row[in_draft] = file[name]
        about = {name: file[name].item() for name in ("draft", "temperature", "prompts")}
    return Steps(*rows), about


def compare(args: argparse.Namespace) -> None:
    """Writes what each rule gains over strict verification, in %, by file and loss."""
    results = []
    for path in args.recorded:
        steps, about = load(path)
        strict, _ = expect(steps.p, steps.p)
        result = about | {"steps": len(steps.p), "strict_tokens": strict, "gain": {}, "value": {}}
        print(f"{about['draft']}, temperature {about['temperature']}: strict {strict:.3f}")
        for name in RULES:
            values, tokens = zip(*(at_loss(name, steps, loss) for loss in LOSSES), strict=True)
            result["gain"][name] = [round(100 * (found / strict - 1), 2) for found in tokens]
            result["value"][name] = [round(value, 4) for value in values]
            print(f"  {name:14}", *(f"{gain:+6.1f} %" for gain in result["gain"][name]))
        results.append(result)
    write_json(args.output, describe_run(None) | {"losses": LOSSES, "results": results})


def record(args: argparse.Namespace) -> None:
    """Serves the prompts and writes what vLLM compares the draft tokens with."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.v1.sample import rejection_sampler

    from vllm_mars.runner import cpu_kernels

    verify = rejection_sampler.rejection_sample
    rows: list[np.ndarray] = []
    lengths: list[int] = []

    def verify_and_keep(drafts: Any, lengths_now: list[int], *rest: Any, **options: Any) -> Any:
        logits, ids = rest[3], drafts.long().clamp(min=0)[:, None]
        p = logits.softmax(-1).gather(1, ids)
        rows.append(np.column_stack([p, logits.gather(1, ids), logits.topk(2).values]))
        lengths.extend(filter(None, lengths_now))
        return verify(drafts, lengths_now, *rest, **options)

    prompts = [[{"role": "user", "content": p.turns[0]}] for p in load_prompts(args.prompts)]
    llm = LLM(
        str(ensure_model()),
        speculative_config=speculative_config(args.draft, args.length),
        **{"dtype": "float32", "enforce_eager": True, "max_num_seqs": 24, "seed": 0},
    )
    cpu_kernels.mend()
    params = SamplingParams(temperature=args.temperature, max_tokens=args.tokens, seed=0)
    with mock.patch.object(rejection_sampler, "rejection_sample", verify_and_keep):
        llm.chat(prompts, params)
    columns = dict(zip(Steps._fields, np.concatenate(rows).astype(np.float32).T, strict=True))
    draft = f"{Path(args.draft).name} K {args.length}"
    about = {"draft": draft, "temperature": args.temperature, "prompts": len(prompts)}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.output, length=lengths, **columns, **about)


def main() -> int:
    """Records or compares; returns 1 if a file is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("record")
    command.set_defaults(run=record)
    command.add_argument("prompts", type=Path, help="JSON lines with 'prompt' or 'turns'")
    command.add_argument("--draft", default=str(PACKAGED_HEAD), help="ngram, or a directory")
    command.add_argument("--length", type=int, default=4, help="draft tokens per step; default 4")
    command.add_argument("--temperature", type=float, default=1.0)
    command.add_argument("--tokens", type=int, default=64, help="of an answer, at most; default 64")
    command.add_argument("--output", type=Path, required=True, metavar="FILE.npz")
    command = commands.add_parser("compare")
    command.set_defaults(run=compare)
    command.add_argument("recorded", type=Path, nargs="+", metavar="FILE.npz")
    command.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    args = parser.parse_args()
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
