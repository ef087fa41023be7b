"""The near ties of the paper's rule in the strict answers of `benchmarks.tasks`, by theta.

    python -m benchmarks.near_ties near-ties.json --answers out.jsonl --tasks chat=prompts.jsonl \\
        --models DIR1 DIR2

A forward pass of each model gives the two largest logits at each position of its answers, at
temperature 1. A position is a near tie if the second is more than theta times the first, which is
positive.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tasks import problems_of, task_file
from benchmarks.text import token_ids
from benchmarks.text_report import STRICT, cell, read_all, show
from vllm_mars.lab.rows import estimate, ratio_of_means
from vllm_mars.servers.provenance import describe_run

THETAS = (0.84, 0.9, 0.96)
COLUMNS: list[list[str | None]] = [
    ["theta", ""],
    ["near ties, %", ".1f"],
    ["p2 / p1: 10%", ".2f"],
    ["median", ".2f"],
    ["nats lost at the runner-up, mean", ".2f"],
]


def top_two(path: Path, dtype: str, answers: list[tuple[str, str]]) -> list[np.ndarray]:
    """Returns for each prompt and answer the two largest logits by position, `[tokens, 2]`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    values = []
    for prompt, text in answers:
        prompt_ids = token_ids(tokenizer, prompt)
        answer_ids = tokenizer(text, add_special_tokens=False).input_ids
        with torch.inference_mode():
            logits = model(
                torch.tensor([prompt_ids + answer_ids]), logits_to_keep=len(answer_ids) + 1
            ).logits[0, :-1]
        values.append(logits.float().topk(2).values.numpy())
    return values


def rows_of(name: str, by_answer: dict[str, np.ndarray]) -> list[list[Any]]:
    """Returns the rows of a model, by theta."""
    logits = np.concatenate([*by_answer.values()])
    low, median, high = np.quantile(logits[:, 0], [0.1, 0.5, 0.9])
    heading = (
        f"{name}, {len(by_answer)} answers, {len(logits)} positions, largest logit "
        f"{median:.1f} (8 in 10 positions: {low:.1f} to {high:.1f})"
    )
    rows: list[list[Any]] = [[heading]]
    for theta in THETAS:
        ties = {name: (z[:, 0] > 0) & (z[:, 1] > theta * z[:, 0]) for name, z in by_answer.items()}
        nats = np.concatenate([z[ties[name]] @ [1, -1] for name, z in by_answer.items()])
        by_prompt = {
            name: {"ties": 100.0 * is_tie.sum(), "positions": len(is_tie)}
            for name, is_tie in ties.items()
        }
        share = cell(estimate(ratio_of_means, by_prompt, ["ties", "positions"]))
        gaps = (np.quantile(nats, [0.9, 0.5]), nats.mean()) if len(nats) else None
        ratios = [None, None] if gaps is None else np.exp(-gaps[0]).tolist()
        rows.append([f"{theta:g}", share, *ratios, gaps and float(gaps[1])])
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("figures", type=Path, help="file to write")
    add("--answers", type=Path, nargs="+", required=True, help="outputs of benchmarks.tasks")
    add("--tasks", nargs="+", type=task_file, required=True, metavar="NAME=FILE")
    add("--models", nargs="+", type=Path, required=True, help="directories")
    args = parser.parse_args(arguments)
    prompts = {p.name: p.prompt for task, path in args.tasks for p in problems_of(task, path)}
    lines, _ = read_all(args.answers)
    by_model: dict[str, dict[str, str]] = defaultdict(dict)
    for line in lines:
        if line["rule"] == STRICT and line["problem"] in prompts and line["seed"] == 0:
            by_model[line["point"]["model"]][line["problem"]] = line["text"]
    rows: list[list[Any]] = []
    for path in args.models:
        texts = by_model[path.name]
        dtype = "float32" if "float32" in path.name else "bfloat16"
        values = top_two(path, dtype, [(prompts[name], text) for name, text in texts.items()])
        rows += rows_of(path.name, dict(zip(texts, values, strict=True)))
    runs = [{**describe_run(None), "raw": f"text/{path.name}"} for path in args.answers]
    show(COLUMNS, rows, runs, args.figures)


if __name__ == "__main__":
    main()
