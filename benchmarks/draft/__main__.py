"""Makes an EAGLE-3 head as the packaged one was made: data, training and export.

python -m benchmarks.draft

`vllm-mars demo --draft DIR` and `vllm-mars sweep --draft DIR` measure a head in vLLM.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm
from transformers import AutoTokenizer

from benchmarks.draft.data import make_data
from benchmarks.draft.export import export
from benchmarks.draft.head import new_head
from benchmarks.draft.recipe import CPU_RECIPE, Recipe
from benchmarks.draft.start import start_linear
from benchmarks.draft.target import HAS_GPU, Target, vllm_answers
from benchmarks.draft.train import choose_draft_tokens, make_batches, train
from vllm_mars.lab.result_file import write_json
from vllm_mars.models.packaged_model import cache_root, ensure_model
from vllm_mars.servers.provenance import git_commit, versions


def make(model: Path, work: Path, recipe: Recipe) -> None:
    """Makes WORK/data and WORK/head."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = make_data(work / "data", recipe, tokenizer, vllm_answers(model))
    batches, target = make_batches(data, recipe), Target(model)
    tokens = choose_draft_tokens(batches, recipe.draft_vocab_size, target.config.vocab_size)
    head = new_head(target, tokens, recipe.seed)
    start_linear(head, target, batches[:8])
    log, begin = [], time.perf_counter()
    bar = tqdm(train(head, target, batches, recipe), "steps", recipe.epochs * len(batches))
    for figures in bar:
        log.append(figures)
        bar.set_postfix_str(f"loss {figures['loss'][0]:.2f}, accepted {figures['accepted'][0]:.2f}")
    record = {
        **{"target": model.name, "device": target.device.type, "recipe": asdict(recipe)},
        **{"conversations": len(data), "answer_tokens": sum(len(answer) for _, answer in data)},
        **{"steps": len(log), "seen_tokens": sum(line["tokens"] for line in log)},
        **{"training_seconds": round(time.perf_counter() - begin), "last_step": log[-1]},
        **{"git_commit": git_commit(), "versions": versions()},
    }
    export(head, work / "head", model)
    write_json(work / "head" / "training.json", record)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft", description=__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the packaged model")
    parser.add_argument("--work", type=Path, metavar="DIR", help="default: in the user's cache")
    for name, default in asdict(Recipe() if HAS_GPU else CPU_RECIPE).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"{default}")
    given = vars(parser.parse_args(argv))
    model = given.pop("model") or ensure_model()
    work = given.pop("work") or cache_root() / f"draft-{model.name}"
    try:
        make(model, work, Recipe(**given))
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {work / 'head'}")


if __name__ == "__main__":
    main()
