"""A study: a head fine-tuned for what a price serves, beside one fine-tuned for strict acceptance.

    python -m benchmarks.draft.for_m WORK           # WORK/for-p and WORK/for-m
    python -m benchmarks.text --draft WORK/for-p --output p.jsonl ...
    python -m benchmarks.text --draft WORK/for-m --output m.jsonl ...
    python -m benchmarks.draft.for_m WORK --compare p.jsonl m.jsonl

Both begin as the packaged head and see the same batches. The README beside this file has the
objective.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

from benchmarks.draft import data as of_questions
from benchmarks.draft.data import Answer, Conversation, make_data
from benchmarks.draft.export import export
from benchmarks.draft.head import Eagle3Head, new_head
from benchmarks.draft.recipe import Recipe
from benchmarks.draft.target import HAS_GPU, Target
from benchmarks.draft.train import batch_losses, log_acceptance, make_batches, train
from benchmarks.text_report import cell, points, read, samples
from vllm_mars.experiments.rows import compared, heat, ratio_of_means
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import write_json

# Conversations that neither head is trained on.
HELD_OUT = 24


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


class Heat:
    """A temperature for each row; 0 is taken as all but 0."""

    def __init__(self, heat: list[float], device: torch.device) -> None:
        self.heat = torch.tensor([[it or 1e-3] for it in heat], device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.float() / self.heat


@contextmanager
def answers(path: Path) -> Iterator[Answer]:
    """A model that answers, by transformers."""
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = model.to("cuda" if HAS_GPU else "cpu").eval()
    (end,) = {AutoTokenizer.from_pretrained(path).eos_token_id}

    def answer(asked: list[list[int]], heat: list[float], longest: int, seed: int) -> Any:
        if not asked:
            return []
        torch.manual_seed(seed % 2**32)
        width = max(map(len, asked))
        tokens = torch.tensor([[end] * (width - len(ids)) + ids for ids in asked])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in asked])
        with torch.inference_mode():
            whole = model.generate(
                tokens.to(model.device),
                attention_mask=mask.to(model.device),
                logits_processor=LogitsProcessorList([Heat(heat, model.device)]),
                do_sample=True,
                **{"top_k": 0, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0},
                max_new_tokens=longest,
                pad_token_id=end,
                eos_token_id=end,
            )
        rows = whole[:, width:].tolist()
        return [row[: row.index(end) + 1] if end in row else row for row in rows]

    yield answer


def data(args: argparse.Namespace, recipe: Recipe) -> list[Conversation]:
    """As many parts as fit into the time."""
    # The target's own questions take as long as its answers.
    of_questions.TEMPLATE_SHARE = 1.0
    model, begin = ensure_model(), time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(model)
    found: list[Conversation] = []
    with answers(model) as answer:
        for parts in range(1, recipe.parts + 1):
            own = dataclasses.replace(recipe, parts=parts)
            found = make_data(args.work / "data", own, tokenizer, nullcontext(answer))
            took = time.monotonic() - begin
            print(f"part {parts}, {len(found)} conversations after {took:.0f} s", flush=True)
            if took * (1 + 1 / parts) > args.data_seconds:
                break
    return found


def adam(matrices: Any, rate: float, decay: float, **_: Any) -> torch.optim.Optimizer:
    """In Muon's place, which multiplies in bfloat16: many CPUs take minutes for a step of that."""
    return torch.optim.AdamW(matrices, rate, (0.9, 0.95), weight_decay=decay)


def fine_tune(args: argparse.Namespace, recipe: Recipe) -> None:
    """Makes WORK/for-p and WORK/for-m."""
    setattr(torch.optim, "Muon", adam)  # noqa: B010
    conversations, target = data(args, recipe), Target(ensure_model())
    target.states = once(target.states)  # type: ignore[method-assign, assignment]
    held_out, batches = (
        make_batches(of, recipe) for of in (conversations[:HELD_OUT], conversations[HELD_OUT:])
    )
    gains: dict[str, Any] = {
        "for-p": log_acceptance,
        "for-m": functools.partial(log_value, price=args.price),
    }

    def measured(head: Eagle3Head) -> list[list[float]]:
        """Means of sum min(p, q) and of V on what was held out, by drafting step, and all steps'."""
        sums = torch.zeros(2, recipe.steps_ahead + 1)
        found: list[torch.Tensor] = []

        def gain(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
            logs = torch.stack([log_acceptance(p, log_q), log_value(p, log_q, args.price)])
            found.append(torch.cat([logs.exp().sum(1), torch.tensor([float(len(p))])]))
            return logs[0]

        with torch.no_grad():
            for batch in held_out:
                batch_losses(head, target, batch, recipe.steps_ahead, True, gain)
        by_step = torch.stack(found).unflatten(0, (-1, recipe.steps_ahead)).sum(0)
        sums[:, :-1] = (by_step[:, :2] / by_step[:, 2:]).T
        sums[:, -1] = sums[:, :-1].mean(1)
        return [[round(it, 5) for it in row] for row in sums.tolist()]

    def runs(count: int) -> tuple[dict[str, Eagle3Head], Iterator[Any]]:
        heads = {name: packaged_head(target) for name in gains}
        each = (
            train(heads[name], target, batches[:count], recipe, gain)
            for name, gain in gains.items()
        )
        return heads, zip(*each, strict=True)

    print("before", measured(packaged_head(target)), flush=True)
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
    before, tokens = measured(heads["for-p"]), 0
    for done, figures in enumerate(steps):
        tokens += figures[0]["tokens"]
        if done % 5 == 0:
            accepted = [[round(it, 3) for it in own["accepted"]] for own in figures]
            print(f"{done}: {accepted}, {time.monotonic() - begin:.0f} s", flush=True)
    gpu = torch.cuda.get_device_name() if HAS_GPU else None
    record = {"run": describe_run(gpu), "recipe": asdict(recipe), "price": args.price}
    record |= {"conversations": len(conversations), "steps": count, "tokens": tokens}
    record |= {"seconds": round(time.monotonic() - begin), "held_out_before": before}
    for name, head in heads.items():
        export(head, args.work / name, ensure_model())
        record[f"held_out_{name}"] = measured(head)
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
    add("--data-seconds", type=float, default=300)
    add("--seconds", type=float, default=600)
    own = {"parts": 8, "part_size": 64, "max_question_tokens": 256, "ramp": 0.0}
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
