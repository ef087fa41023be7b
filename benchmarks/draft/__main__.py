"""Makes the EAGLE-3 head of the packaged model again: data, training and export.

python -m benchmarks.draft

`vllm-mars demo --draft DIR` and `vllm-mars sweep --draft DIR` measure a head in vLLM.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from benchmarks.draft.data import Shard, make_data
from benchmarks.draft.export import export
from benchmarks.draft.head import new_head
from benchmarks.draft.recipe import Recipe
from benchmarks.draft.start import start_linear
from benchmarks.draft.target import Answer, Target, vllm_answers
from benchmarks.draft.train import choose_draft_tokens, num_steps, train
from vllm_mars.local.packaged_model import cache_root, ensure_model
from vllm_mars.local.provenance import git_commit, versions
from vllm_mars.local.result_file import write_json

# The draft vocabulary is counted in the first of the shards.
FIRST_SHARDS = 8


def make(model: Path, work: Path, recipe: Recipe, answer: Answer) -> None:
    """Makes WORK/data and WORK/head."""
    has_bf16 = torch.cpu._is_avx512_bf16_supported()
    target = Target(model, torch.bfloat16 if has_bf16 else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    paths = make_data(work / "data", recipe, target, tokenizer, answer)
    size, vocab_size = recipe.draft_vocab_size, target.config.vocab_size
    tokens = choose_draft_tokens(paths[:FIRST_SHARDS], size, vocab_size)
    head = new_head(target, tokens, recipe.seed)
    start_linear(head, target, Shard(paths[0]))
    log, begin = [], time.perf_counter()
    bar = tqdm(train(head, target, paths, recipe), "steps", num_steps(recipe))
    for figures in bar:
        log.append(figures)
        bar.set_postfix_str(f"loss {figures['loss'][0]:.2f}, right {figures['accuracy'][0]:.2f}")
    seconds = round(time.perf_counter() - begin)
    export(head, work / "head", model)
    record = {
        **{"target": model.name, "recipe": asdict(recipe), "steps": len(log)},
        **{"seen_tokens": sum(line["tokens"] for line in log), "training_seconds": seconds},
        **{"git_commit": git_commit(), "versions": versions()},
    }
    write_json(work / "head" / "training.json", record)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft", description=__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the packaged model")
    parser.add_argument("--work", type=Path, metavar="DIR", help="default: in the user's cache")
    for field in fields(Recipe):
        name, default = field.name.replace("_", "-"), field.default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{default}")
    args = parser.parse_args(argv)
    model = args.model or ensure_model()
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
    work = args.work or cache_root() / f"draft-{model.name}"
    answer, end = vllm_answers(model)
    try:
        make(model, work, recipe, answer)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        end()
    print(f"wrote {work / 'head'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
