"""A study: a head fine-tuned for what a price serves, beside one fine-tuned for strict acceptance.

    python -m benchmarks.draft.for_m WORK           # WORK/for-p and WORK/for-m
    python -m benchmarks.text --draft WORK/for-p --output p.jsonl ...
    python -m benchmarks.text --draft WORK/for-m --output m.jsonl ...
    python -m benchmarks.draft.for_m WORK --compare p.jsonl m.jsonl

Both begin as the packaged head and see the same batches. The README beside this file has the
objective. On a CPU say VLLM_CPU_KVCACHE_SPACE=4 VLLM_ENABLE_V1_MULTIPROCESSING=0.
"""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks.draft import data as of_questions
from benchmarks.draft.data import make_data
from benchmarks.draft.export import export
from benchmarks.draft.head import Eagle3Head, new_head
from benchmarks.draft.recipe import Recipe
from benchmarks.draft.target import HAS_GPU, Target, vllm_answers
from benchmarks.draft.train import batch_losses, log_acceptance, make_batches, train
from benchmarks.text_report import cell, points, read, samples
from vllm_mars.experiments.rows import Samples, compared, estimate, heat, ratio_of_means
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import write_json

# Conversations that neither head is trained on.
HELD_OUT = 60


def log_value(p: torch.Tensor, log_q: torch.Tensor, price: float) -> torch.Tensor:
    """log V(p, q), [rows], whose gradient is that of V by the envelope theorem.

    Args:
        p, log_q: [rows, tokens].
        price: nats for a draft token that stays.
    """
    with torch.no_grad():
        ratio = log_q - p.clamp(min=1e-30).log()
        # log w: the mass of m rises with it, from at most 1 to at least 1.
        low, high = torch.full_like(p[:, :1], -price), torch.zeros_like(p[:, :1])
        for _ in range(14):
            middle = (low + high) / 2
            mass = (p * ratio.clamp(middle, middle + price).exp()).sum(-1, keepdim=True)
            low, high = torch.where(mass < 1, middle, low), torch.where(mass < 1, high, middle)
        tilt = ratio.clamp(low, low + price)
        m = p * tilt.exp()
        value = torch.minimum(m, log_q.exp()).sum(-1) - (m * tilt).sum(-1) / price
        slope = (1 - (ratio - low) / price).clamp(0, 1)
    q = log_q.exp()
    return value.log() + ((q - q.detach()) * slope).sum(-1) / value


def packaged_head(target: Target) -> Eagle3Head:
    """The packaged head, to go on with."""
    weights = load_file(PACKAGED_HEAD / "model.safetensors")
    shifts = weights.pop("d2t")
    head = new_head(target, shifts + torch.arange(len(shifts)))
    head.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return head.to(target.device)


def once(states: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Keeps what was said of tokens: both heads ask for it, and each pass over the data."""
    kept: dict[bytes, torch.Tensor] = {}

    def of(tokens: torch.Tensor) -> torch.Tensor:
        name = repr(tokens.tolist()).encode()
        if name not in kept:
            kept[name] = states(tokens)
        return kept[name]

    return of


def adam(matrices: Any, rate: float, decay: float, **_: Any) -> torch.optim.Optimizer:
    """In Muon's place, which multiplies in bfloat16: many CPUs take minutes for a step of that."""
    return torch.optim.AdamW(matrices, rate, (0.9, 0.95), weight_decay=decay)


def fine_tune(args: argparse.Namespace, recipe: Recipe) -> None:
    """Makes WORK/for-p and WORK/for-m."""
    setattr(torch.optim, "Muon", adam)  # noqa: B010
    # The target's own questions take as long as its answers.
    of_questions.TEMPLATE_SHARE = 1.0
    model = ensure_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    conversations = make_data(args.work / "data", recipe, tokenizer, vllm_answers(model))
    target = Target(model)
    target.states = once(target.states)  # type: ignore[method-assign, assignment]
    # Each alone, so that it is a sample.
    held_out = [it for one in conversations[:HELD_OUT] for it in make_batches([one], recipe)]
    batches = make_batches(conversations[HELD_OUT:], recipe)
    gains: dict[str, Any] = {
        "for-p": log_acceptance,
        "for-m": functools.partial(log_value, price=args.price),
    }

    def measured(head: Eagle3Head) -> Samples:
        """Of each conversation that was held out: sums of a and V over all guesses, and these."""
        found: dict[int, dict[str, float]] = {}

        def gain(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
            each = {"a": log_acceptance(p, log_q), "V": log_value(p, log_q, args.price)}
            sums = {name: float(logs.exp().sum()) for name, logs in each.items()}
            for name, value in {**sums, "guesses": float(len(p))}.items():
                own[name] = own.get(name, 0) + value
            return each["a"]

        with torch.no_grad():
            for at, batch in enumerate(held_out):
                own = found.setdefault(at, {})
                batch_losses(head, target, batch, recipe.steps_ahead, True, gain)
        return found

    def runs(count: int) -> tuple[dict[str, Eagle3Head], Iterator[Any]]:
        heads = {name: packaged_head(target) for name in gains}
        each = (
            train(heads[name], target, batches[:count], recipe, gain)
            for name, gain in gains.items()
        )
        return heads, zip(*each, strict=True)

    known = {"packaged": measured(packaged_head(target))}
    for _ in runs(1)[1]:
        pass
    begin = time.monotonic()
    for _ in runs(2)[1]:
        pass
    count = int(args.seconds / (time.monotonic() - begin) * 2)
    begin = time.monotonic()
    print(f"{count} steps of {len(batches)} batches", flush=True)
    batches = list(itertools.islice(itertools.cycle(batches), count))
    heads, steps = runs(count)
    tokens = 0
    for done, figures in enumerate(steps):
        tokens += figures[0]["tokens"]
        if done % 5 == 0:
            accepted = [[round(it, 3) for it in own["accepted"]] for own in figures]
            print(f"{done}: {accepted}, {time.monotonic() - begin:.0f} s", flush=True)
    gpu = torch.cuda.get_device_name() if HAS_GPU else None
    record: dict[str, Any] = {
        "run": describe_run(gpu),
        "recipe": asdict(recipe),
        "price": args.price,
    }
    record |= {"conversations": len(conversations), "steps": count, "tokens": tokens}
    record |= {"seconds": round(time.monotonic() - begin)}
    for name, head in heads.items():
        export(head, args.work / name, model)
        known[name] = measured(head)
    pairs = [("for-p", "packaged"), ("for-m", "packaged"), ("for-m", "for-p")]
    for name in ("a", "V"):
        of = [name, "guesses"]
        record |= {f"{name}, {it}": estimate(ratio_of_means, known[it], of) for it in known}
        for one, other in pairs:
            own = compared(ratio_of_means, known[one], known[other], of)
            record[f"{name}, {one} / {other}"] = own
    write_json(args.work / "training.json", record)
    print(json.dumps(record))


def compare(args: argparse.Namespace) -> None:
    """Prints what the second output has over the first, paired by prompt."""
    first, second = (
        {
            (point[-1], name): calls
            for point, by_rule in points([it for it in read(path) if "run" not in it]).items()
            for name, calls in by_rule.items()
        }
        for path in args.compare
    )
    for key in first:
        found = [str(key[1]), heat(key[0])]
        pairs = samples(second[key]), samples(first[key])
        ended = samples(second[key], ended=True), samples(first[key], ended=True)
        for label, of, names, by in (
            ("tokens per step, x", pairs, ["further", "steps"], None),
            ("where answers ended, x", ended, ["further", "steps"], None),
            ("length, x", pairs, ["tokens", "one"], None),
            ("repeated 4-grams, less", pairs, ["repeated", "grams"], np.subtract),
        ):
            own = compared(ratio_of_means, *of, names, *([by] if by else []))
            found.append(f"{label} {cell(own)}")
        for calls in (first[key], second[key]):
            lost = sum(it["lost"] for it in calls)
            drift = sum(itertools.chain.from_iterable(it["answers"]["drift"] for it in calls))
            tokens = sum(sum(it["answers"]["tokens"]) for it in calls)
            found.append(f"nats {(lost if key[0] else drift) / tokens:.4f}")
        print("; ".join(found))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("work", type=Path)
    add("--compare", type=Path, nargs=2)
    add("--price", type=float, default=0.5)
    add("--seconds", type=float, default=600)
    own = {"parts": 3, "part_size": 96, "max_question_tokens": 256, "ramp": 0.0}
    own |= {
        "learning_rate": 1e-4,
        "adam_learning_rate": 1e-4,
        "warm_up": 3,
        "max_answer_tokens": 192,
        "batch_tokens": 1000,
    }
    for name, default in {**asdict(Recipe()), **own}.items():
        add(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    if args.compare:
        compare(args)
    else:
        fine_tune(args, Recipe(**{name: getattr(args, name) for name in asdict(Recipe())}))


if __name__ == "__main__":
    main()
