"""What trees of drafts are worth beside chains, strict and relaxed: offline, without vLLM.

    python -m benchmarks.tree run --prompts question.jsonl --work build/trees.jsonl
    python -m benchmarks.tree run --prompts question.jsonl --work build/sampled.jsonl --sampled
    python -m benchmarks.tree summarise --work build/trees.jsonl \\
        --load benchmarks/results/load-cpu.json \\
        --output benchmarks/results/trees-cpu.json --plot docs/trees.png

`run` answers the prompts once for each cell, a rule with a shape of drafts, since a relaxed answer
is another text. It goes on where it was interrupted. Of a tree the target reads only the nodes that
the rule can reach, level by level, which gives what reading all would; counted are the rows that a
server would read: all nodes and the root. Strict answers are all the same text, so the target reads
it once.

The decisions are those of `vllm_mars.verify_tree`.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.tree_cells import DEPTH, WIDTH, Answer, Recorded, Rule, Shape, run_cell
from benchmarks.tree_models import TreeHead, TreeTarget
from benchmarks.tree_summary import summary, tables
from vllm_mars.local.draft_head import packaged_head
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import load_prompts
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import write_json

SCHEMA = "vllm-mars/trees/1"
# Answers are recorded beyond their end, so that the last steps, too, are judged by them.
BEYOND = 10
STRICT = Rule("strict", 0.0)
RULES = [
    *(Rule("theta", 0.9), Rule("price", 0.5), Rule("price", 1.0), Rule("price", 0.25)),
    Rule("gap", 1.0),
]
CHAINS = [Shape("chain", nodes) for nodes in range(1, 10)]
TREES = [Shape("tree", nodes) for nodes in (4, 8, 16, 32, 60)]
# In the order in which they are measured: what answers most comes first.
PAIR = [Shape("chain", 8), Shape("tree", 8)]
FIRST_SHAPES = [*PAIR, Shape("tree", 60), Shape("chain", 4), Shape("tree", 4)]
CELLS = [
    *((rule, shape) for rule in (STRICT, *RULES[:2]) for shape in PAIR),
    *((STRICT, shape) for shape in (*FIRST_SHAPES, *CHAINS, *TREES)),
    *((rule, shape) for shape in PAIR for rule in RULES),
    *((rule, shape) for rule in RULES[:2] for shape in FIRST_SHAPES),
    *((rule, shape) for shape in (*FIRST_SHAPES, *TREES, *CHAINS) for rule in RULES),
]
# Requests that sample: among all tokens by price, or by gap among the two largest alone.
SAMPLED_CELLS = [
    (Rule(metric, value, temperature), Shape("chain", 5))
    for metric, value in (
        *(("strict", 0.0), ("price", 0.5), ("gap", 0.5), ("price", 1.0), ("gap", 1.0)),
        *(("price", 2.0), ("gap", 2.0)),
    )
    for temperature in (0.7, 1.0)
]
SAMPLED_FIGURES = ("nll", "beyond_two")


@dataclass(frozen=True)
class Study:
    """The prompts, and what has read them.

    Attributes:
        target, head: that have read the prompts.
        prompts: token ids of each.
        firsts: the first token of each answer.
        protected: bool `[vocab]`.
        max_tokens: of an answer.
    """

    target: TreeTarget
    head: TreeHead
    prompts: list[list[int]]
    firsts: list[int]
    protected: torch.Tensor
    max_tokens: int

    @classmethod
    def open(cls, model: Path, head: Path, prompts: list[list[int]], max_tokens: int) -> "Study":
        """Reads the models and the prompts."""
        from transformers import AutoTokenizer

        config = json.loads((head / "config.json").read_text())
        layers = tuple(config["eagle_aux_hidden_state_layer_ids"])
        # Room for the answers as they are recorded, a step beyond them, and what a step reads.
        capacity = max(map(len, prompts)) + max_tokens + BEYOND + 80
        target = TreeTarget(model, layers, len(prompts), capacity)
        drafter = TreeHead(head, target.embedding, len(prompts), capacity)
        firsts = []
        for row, prompt in enumerate(prompts):
            logits, states = target.fill(row, prompt)
            firsts.append(int(logits.argmax()))
            drafter.follow(row, states, [*prompt[1:], firsts[-1]])
        protected = torch.zeros(len(target.lm_head), dtype=torch.bool)
        protected[[target.eos, *AutoTokenizer.from_pretrained(model).all_special_ids]] = True
        return cls(target, drafter, prompts, firsts, protected, max_tokens)

    def answer(
        self, rule: Rule, shape: Shape, recorded: Recorded | None = None, beyond: int = 0
    ) -> list[Answer]:
        """Runs a cell from the prompts on."""
        lengths = [len(prompt) for prompt in self.prompts]
        target = recorded or self.target
        target.lengths = lengths
        self.head.rewind()
        most = self.max_tokens + beyond
        return run_cell(target, self.head, self.firsts, rule, shape, most, self.protected)

    def record(self) -> Recorded:
        """The target's own answers, somewhat beyond their end."""
        answers = self.answer(STRICT, Shape("chain", 4), beyond=BEYOND)
        return Recorded(
            [prompt + answer.tokens for prompt, answer in zip(self.prompts, answers, strict=True)],
            [torch.cat(states) for states in self.head.states],
            [len(prompt) for prompt in self.prompts],
            len(self.target.lm_head),
            self.target.eos,
        )


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
    model, head = args.model or ensure_model(), args.head or packaged_head()
    if head is None:
        raise ValueError("there is no trained head; name one with --head.")
    chosen = choose_prompts(args.prompts, model, args.per_category, args.max_prompt_tokens)
    config = {
        **{"model": model.name, "head": head.name, "prompts": args.prompts.name},
        "prompts_sha256": hashlib.sha256(args.prompts.read_bytes()).hexdigest(),
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
    study = Study.open(model, head, [ids for _, _, ids in chosen], args.max_tokens)
    recorded: Recorded | None = None
    for rule, shape in dict.fromkeys(SAMPLED_CELLS if args.sampled else CELLS):
        name = str(rule), str(shape)
        is_chosen = args.only is None or not set(args.only).isdisjoint(name)
        if name in done or not is_chosen:
            continue
        if rule == STRICT and recorded is None:
            recorded = study.record()
        torch.manual_seed(args.seed)
        begin = time.monotonic()
        answers = study.answer(rule, shape, recorded if rule == STRICT else None)
        line = {
            "schema": SCHEMA,
            **described,
            "config": config,
            "rule": str(rule),
            "shape": str(shape),
            "nodes": shape.nodes,
            "threads": args.threads,
            "seconds": round(time.monotonic() - begin, 1),
            "tokens": [len(answer.tokens) - 1 for answer in answers],
            "steps": [answer.steps for answer in answers],
            "relaxed": [answer.relaxed for answer in answers],
            "lost": [answer.lost for answer in answers],
            **(
                {name: [getattr(answer, name) for answer in answers] for name in SAMPLED_FIGURES}
                if rule.temperature
                else {}
            ),
            "repeated": [repeated(answer.tokens) for answer in answers],
            "ranks": [rank for answer in answers for rank in answer.ranks],
        }
        args.work.parent.mkdir(parents=True, exist_ok=True)
        with args.work.open("a") as file:
            file.write(json.dumps(line) + "\n")
        length = sum(line["tokens"]) / sum(line["steps"])
        print(f"{rule}, {shape}: {length:.3f} in {line['seconds']} s", flush=True)
    return 0


def repeated(tokens: list[int]) -> int:
    """How many 4-grams of an answer stand earlier in it."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(grams) - len(set(grams))


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
    sums = commands.add_parser("summarise", help="intervals, the cost model, and the plot")
    sums.add_argument("--work", type=Path, required=True, nargs="+", metavar="FILE")
    sums.add_argument("--load", type=Path, metavar="FILE", help="with the time of a step")
    sums.add_argument("--output", type=Path, required=True, metavar="FILE")
    sums.add_argument("--plot", type=Path, metavar="PNG")
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
    if args.plot:
        # Only this needs matplotlib.
        from benchmarks.tree_plot import plot

        plot(result, args.plot)
    for own in tables(result).values():
        print(*own, "", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
