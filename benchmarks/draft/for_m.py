"""A study: a head fine-tuned for what a price serves, beside one fine-tuned for strict acceptance.

    python -m benchmarks.draft.for_m WORK data
    python -m benchmarks.draft.for_m WORK train --price 0     # the recipe's own loss: WORK/for-p
    python -m benchmarks.draft.for_m WORK train --price 0.5   # WORK/for-m
    python -m benchmarks.draft.for_m WORK compare p.jsonl m.jsonl

Both begin as the packaged head and see the same batches; between the last two lines
`benchmarks.text --draft WORK/for-p` and `for-m` ask both heads for answers. The README beside this
file has the objective.
"""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.draft.data import Answer, make_data
from benchmarks.draft.export import export
from benchmarks.draft.head import Eagle3Head, new_head
from benchmarks.draft.recipe import Recipe
from benchmarks.draft.target import HAS_GPU, Target
from benchmarks.draft.train import batch_losses, log_acceptance, make_batches, train
from benchmarks.text_report import cell, points, read, samples
from vllm_mars.experiments.rows import compared, heat, ratio_of_means
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.provenance import describe_run, vllm_device
from vllm_mars.local.result_file import write_json
from vllm_mars.local.vllm_args import CPU_ENGINE_ARGS

# Conversations that neither head is trained on.
HELD_OUT = 400


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


@contextmanager
def answers(model: Path) -> Iterator[Answer]:
    """Runs an engine of a model, which answers; it starts without a compiler."""
    from vllm import LLM, SamplingParams

    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    on_gpu: dict[str, Any] = {"dtype": "bfloat16", "compilation_config": graphs}
    on_gpu |= {"max_num_seqs": 1024, "kv_cache_memory_bytes": 20 << 30, "max_model_len": 2048}
    llm = LLM(str(model), **(on_gpu if HAS_GPU else CPU_ENGINE_ARGS))

    def answer(asked: list[list[int]], heat: list[float], longest: int, seed: int) -> Any:
        options = [
            SamplingParams(temperature=one, max_tokens=longest, detokenize=False) for one in heat
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked], options)
        return [list(output.outputs[0].token_ids) for output in outputs]

    yield answer


def fine_tune(args: argparse.Namespace, recipe: Recipe) -> None:
    """Makes WORK/for-p or WORK/for-m."""
    begin = time.perf_counter()
    gain = functools.partial(log_value, price=args.price) if args.price else log_acceptance
    parts = sorted((args.work / "data").glob("*.json"))
    data = [it for part in parts for it in json.loads(part.read_text())["conversations"]]
    target = Target(ensure_model())
    head = packaged_head(target)
    held_out, batches = (make_batches(of, recipe) for of in (data[:HELD_OUT], data[HELD_OUT:]))

    def acceptance() -> list[float]:
        """By drafting step, on the true tokens of what was held out: mean of sum min(p, q)."""
        with torch.no_grad():
            found = [
                batch_losses(head, target, it, recipe.steps_ahead, True)[1:] for it in held_out
            ]
        weighed = torch.stack([accepted * number for accepted, number in found]).sum(0)
        return [round(it, 4) for it in (weighed / sum(number for _, number in found)).tolist()]

    before = acceptance()
    log = []
    for step in train(head, target, batches, recipe, gain):
        log.append(step)
        if len(log) % 20 == 1:
            accepted = [round(it, 3) for it in step["accepted"]]
            took = time.perf_counter() - begin
            print(f"{len(log)} of {len(batches)}: {accepted}, {took:.0f} s", flush=True)
    directory = args.work / ("for-m" if args.price else "for-p")
    export(head, directory, ensure_model())
    record = {"run": describe_run(vllm_device()[1]), "recipe": asdict(recipe), "price": args.price}
    record |= {"conversations": len(data), "tokens": sum(it["tokens"] for it in log)}
    record |= {"held_out_before": before, "held_out_after": acceptance()}
    record |= {"seconds": round(time.perf_counter() - begin)}
    write_json(directory / "training.json", record)
    print(json.dumps(record))


def compare(args: argparse.Namespace) -> None:
    """Prints what the second output has over the first, paired by prompt."""
    first, second = (
        {
            (point[-1], name): calls
            for point, by_rule in points([it for it in read(path) if "run" not in it]).items()
            for name, calls in by_rule.items()
        }
        for path in args.outputs
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
    add("stage", choices=("data", "train", "compare"))
    add("outputs", type=Path, nargs="*")
    add("--price", type=float, default=0.0)
    for name, default in asdict(Recipe(parts=4, ramp=0.0, learning_rate=5e-4)).items():
        add(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in asdict(Recipe())}
    recipe = Recipe(**given)
    if args.stage == "data":
        from transformers import AutoTokenizer

        model = ensure_model()
        tokenizer = AutoTokenizer.from_pretrained(model)
        make_data(args.work / "data", recipe, tokenizer, answers(model))
    elif args.stage == "train":
        fine_tune(args, recipe)
    else:
        compare(args)


if __name__ == "__main__":
    main()
