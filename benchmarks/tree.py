"""What trees of drafts are worth beside chains, strict and relaxed: offline, without vLLM.

    python -m benchmarks.tree run --prompts question.jsonl --work build/trees.jsonl
    python -m benchmarks.tree run --prompts question.jsonl --work build/sampled.jsonl --sampled
    python -m benchmarks.tree summarise --work build/trees.jsonl \\
        --load benchmarks/results/load-cpu.json \\
        --output benchmarks/results/trees-cpu.json

`run` answers the prompts once for each cell, a rule with a shape of drafts, since a relaxed answer
is another text. It goes on where it was interrupted. The target reads the root and all nodes of a
draft in one pass, as a server would, and `vllm_mars.verify_tree` decides.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.tree_cells import DEPTH, STRICT, WIDTH, DraftShape, Rule, Study, counts
from benchmarks.tree_summary import COUNTS, SAMPLED_COUNTS, summary, tables
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.packaged_model import ensure_model, sha256
from vllm_mars.local.prompts import load_prompts
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import write_json

SCHEMA = "vllm-mars/trees/1"
# In the order in which they are measured: what answers most comes first.
RULES = [
    *(STRICT, Rule("theta", 0.9), Rule("price", 0.5), Rule("price", 1.0), Rule("price", 0.25)),
    Rule("gap", 1.0),
]
FIRST_SHAPES = [
    DraftShape("chain", 8),
    DraftShape("tree", 8),
    DraftShape("tree", 60),
    DraftShape("chain", 4),
]
SHAPES = [DraftShape("tree", nodes) for nodes in (4, 8, 16, 32, 60)]
SHAPES += [DraftShape("chain", nodes) for nodes in range(1, 10)]
CELLS = [(rule, shape) for shape in dict.fromkeys(FIRST_SHAPES + SHAPES) for rule in RULES]
# Requests that sample: among all tokens by price, or by gap among the two largest alone.
LOOSE = [(metric, value) for value in (0.5, 1.0, 2.0) for metric in ("price", "gap")]
SAMPLED_CELLS = [
    (Rule(metric, value, temperature), DraftShape("chain", 5))
    for metric, value in (("strict", 0.0), *LOOSE)
    for temperature in (0.7, 1.0)
]


def choose_prompts(
    path: Path, model: Path, per_category: int, most_tokens: int
) -> list[tuple[str, str, list[int]]]:
    """The first so many prompts of each category that are short enough: id, category, tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    found: dict[str, list[tuple[str, str, list[int]]]] = {}
    for prompt in load_prompts(path):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.turns[0]}],
            add_generation_prompt=True,
            tokenize=True,
        )["input_ids"]
        kept = found.setdefault(prompt.category, [])
        if len(ids) <= most_tokens and len(kept) < per_category:
            kept.append((prompt.id, prompt.category, ids))
    return [prompt for prompts in found.values() for prompt in prompts]


def run(args: argparse.Namespace) -> int:
    """Measures what is not in the work file yet."""
    torch.set_num_threads(args.threads)
    model, head = args.model or ensure_model(), args.head or PACKAGED_HEAD
    chosen = choose_prompts(args.prompts, model, args.per_category, args.max_prompt_tokens)
    config = {
        **{"model": model.name, "head": head.name, "prompts": args.prompts.name},
        "prompts_sha256": sha256(args.prompts),
        "per_category": args.per_category,
        "max_prompt_tokens": args.max_prompt_tokens,
        **{"max_tokens": args.max_tokens, "width": WIDTH, "depth": DEPTH},
        **({"seed": args.seed} if args.sampled else {}),
        "prompt_ids": [name for name, _, _ in chosen],
        "categories": [category for _, category, _ in chosen],
    }
    lines = read_lines(args.work) if args.work.exists() else []
    if any(line["config"] != config for line in lines):
        raise ValueError(f"work={args.work} holds another study; name another file.")
    done = {(line["rule"], line["shape"]) for line in lines}
    described = describe_run(None)
    study = Study(model, head, [ids for _, _, ids in chosen], args.max_tokens)
    args.work.parent.mkdir(parents=True, exist_ok=True)
    for rule, shape in SAMPLED_CELLS if args.sampled else CELLS:
        name = str(rule), str(shape)
        if name in done or (args.only and set(args.only).isdisjoint(name)):
            continue
        torch.manual_seed(args.seed)
        begin = time.monotonic()
        answers = study.answer(rule, shape)
        line = {
            **{"schema": SCHEMA, **described, "config": config},
            **{"rule": str(rule), "shape": str(shape), "nodes": shape.nodes},
            **{"threads": args.threads, "seconds": round(time.monotonic() - begin, 1)},
            **counts(answers, (*COUNTS, *(SAMPLED_COUNTS if rule.temperature else ()))),
            "ranks": [rank for answer in answers for rank in answer.ranks],
        }
        with args.work.open("a") as file:
            file.write(json.dumps(line) + "\n")
        length = sum(line["tokens"]) / sum(line["steps"])
        print(f"{rule}, {shape}: {length:.3f} in {line['seconds']} s", flush=True)
    return 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The cells of a work file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, or 1 after an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tree", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="measure the cells that are missing")
    runs.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines")
    runs.add_argument("--work", type=Path, required=True, metavar="FILE", help="goes on from it")
    runs.add_argument("--head", type=Path, metavar="DIR", help="default: the packaged head")
    runs.add_argument("--per-category", type=int, default=13, metavar="N")
    runs.add_argument("--max-prompt-tokens", type=int, default=300, metavar="N")
    runs.add_argument("--max-tokens", type=int, default=48, metavar="N", help="of an answer")
    runs.add_argument("--model", type=Path, metavar="DIR", help="default: the packaged one")
    runs.add_argument("--threads", type=int, default=1, metavar="N")
    runs.add_argument(
        "--only",
        nargs="+",
        choices=sorted({str(part) for cell in CELLS for part in cell}),
        metavar="NAME",
        help="the cells of these rules or shapes, such as 'theta 0.9' and 'chain 8'; default: all",
    )
    runs.add_argument("--sampled", action="store_true", help="requests that sample, in chains of 5")
    runs.add_argument("--seed", type=int, default=0, metavar="N", help="of their draws")
    sums = commands.add_parser("summarise", help="intervals and the cost model")
    sums.add_argument("--work", type=Path, required=True, nargs="+", metavar="FILE")
    sums.add_argument("--load", type=Path, metavar="FILE", help="with the time of a step")
    sums.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        return {"run": run, "summarise": summarise}[args.command](args)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def summarise(args: argparse.Namespace) -> int:
    """Writes what the cells say together; returns 0."""
    load = json.loads(args.load.read_text()) if args.load else None
    lines = [line for path in args.work for line in read_lines(path)]
    if any(line["config"] != lines[0]["config"] for line in lines):
        raise ValueError(f"work={' '.join(map(str, args.work))} are of different studies.")
    result = summary(lines, load)
    write_json(args.output, result)
    for own in tables(result).values():
        print(*own, "", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
