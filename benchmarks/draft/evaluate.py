"""What the target takes of heads' guesses, strictly and by the price rule: offline, without vLLM.

The answers are those of `benchmarks.tree`, in chains of K drafts: a step starts where the one
before was rejected, and what a price accepts is what the answer goes on from. (A mean over all
tokens would flatter a head: easy stretches are walked in long strides, so that more steps start in
hard ones.) The server's guard against repetition is off; repeated 4-grams are counted.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.markdown import described
from benchmarks.tree import choose_prompts
from benchmarks.tree_cells import STRICT, DraftShape, Rule, Study, counts
from benchmarks.tree_summary import COUNTS, LOSSES, both_by_loss, figures_of, with_interval
from vllm_mars.experiments.columns import Columns, at, filled
from vllm_mars.local.draft_head import WEIGHTS_KEY, check_head
from vllm_mars.local.intervals import resamples
from vllm_mars.local.packaged_model import sha256
from vllm_mars.local.provenance import describe_run
from vllm_mars.local.result_file import write_json

SCHEMA = "vllm-mars/drafts/2"
# What tells heads apart, of their training.json.
TRAINED = (
    *("steps", "seen_tokens", "draft_vocab_size", "aux_layers", "megabytes"),
    *("steps_ahead", "loss", "price", "epochs"),
)
COLUMNS: Columns = {
    "head": at("head"),
    "rule": at("rule"),
    "tokens per step": at("length", ".2f"),
    "accepted by position": lambda of: " ".join(
        f"{share:.2f}" for share in np.array(of["accepted"]).sum(0) / sum(of["steps"])
    ),
    "nats per token": at("nats_per_token", ".3f"),
}
BY_HEAD: Columns = {
    "head": at("head"),
    "tokens per step, strict": at("length", ".2f"),
    "x the first head's": at("ratio", ".3f"),
    **{f"at {loss:g} nats per token": at(str(loss), ".3f") for loss in LOSSES},
}


def evaluate_heads(
    model: Path,
    heads: list[Path],
    prompts: Path,
    output: Path,
    *,
    max_tokens: int,
    steps: int,
    prices: list[float],
    per_category: int = sys.maxsize,
) -> dict[str, Any]:
    """Measures heads that are not in the result file yet, each at each price, in float32.

    Args:
        model, heads: directories; heads are told apart by the names of theirs.
        prompts: of each conversation the first turn is asked.
        output: the result file, written after each head and price.
        max_tokens: an answer ends with the step that reaches as many.
        steps: drafts per step.
        prices: in nats; 0 is strict verification.
        per_category: the first so many prompts of each category.

    Returns:
        The result file's content. Each of its `cells` has a head's name and checksum, a rule, and
        per prompt what was emitted, verified, accepted by position and lost, the last in units of
        2**-16 nats.

    Raises:
        ValueError: a head is damaged or for another target, two have one name, or the file holds
            another measurement.
    """
    for directory in heads:
        check_head(directory, model)
    if len({directory.name for directory in heads}) < len(heads):
        raise ValueError("heads have one name; give each a directory of its own name.")
    chosen = choose_prompts(prompts, model, per_category, sys.maxsize)
    config: dict[str, Any] = {
        **{"model": model.name, "prompts": prompts.name, "prompts_sha256": sha256(prompts)},
        **{"prompt_ids": [name for name, _, _ in chosen], "max_tokens": max_tokens},
        "num_speculative_tokens": steps,
    }
    checksums = {
        directory.name: json.loads((directory / "config.json").read_text())[WEIGHTS_KEY]
        for directory in heads
    }
    result: dict[str, Any] = {"schema": SCHEMA, **describe_run(None), "config": config, "cells": []}
    if output.is_file():
        found = json.loads(output.read_text())
        if (found.get("schema"), found.get("config")) != (SCHEMA, config):
            raise ValueError(f"output={output} holds another measurement; name another file.")
        # A head that was trained on since is measured again.
        result["cells"] = [
            cell
            for cell in found["cells"]
            if checksums.get(cell["head"], cell["sha256"]) == cell["sha256"]
        ]
    done = {(cell["head"], cell["rule"]) for cell in result["cells"]}
    rules = [Rule("price", price) if price else STRICT for price in prices]
    for directory in heads:
        missing = [rule for rule in rules if (directory.name, str(rule)) not in done]
        if not missing:
            continue
        study = Study(model, directory, [ids for _, _, ids in chosen], max_tokens)
        for rule in missing:
            answers = study.answer(rule, DraftShape("chain", steps))
            result["cells"].append(
                {
                    **{"head": directory.name, "sha256": checksums[directory.name]},
                    **{"rule": str(rule), "nodes": steps, "git_commit": result["git_commit"]},
                    "trained": _trained(directory),
                    **counts(answers, COUNTS),
                    "accepted": [
                        [sum(count > place for count in answer.accepted) for place in range(steps)]
                        for answer in answers
                    ],
                }
            )
            write_json(output, result)
    return result


def tables(result: dict[str, Any]) -> dict[str, list[str]]:
    """Lines of Markdown: each head and rule, and each head beside the first, also at equal loss."""
    draws = resamples(len(result["cells"][0]["steps"]))
    found = {(cell["rule"], cell["head"]): figures_of(cell, draws) for cell in result["cells"]}
    rows = [
        cell | {name: with_interval(of) for name, of in found[cell["rule"], cell["head"]].items()}
        for cell in result["cells"]
    ]
    heads = list(dict.fromkeys(head for _, head in found))
    by_head: list[dict[str, Any]] = []
    for head in heads:
        of: dict[str, Any] = {"head": head}
        if {(str(STRICT), head), (str(STRICT), heads[0])} <= found.keys():
            own, first = (found[str(STRICT), name]["length"] for name in (head, heads[0]))
            of |= {"length": with_interval(own), "ratio": with_interval(own / first)}
        for loss, own, first in both_by_loss(found, head, heads[0]):
            of[str(loss)] = with_interval(own / first)
        by_head.append(of)
    columns = filled(BY_HEAD, by_head)
    return {"rules": described(COLUMNS, rows), "heads": described(columns, by_head)}


def _trained(directory: Path) -> dict[str, Any]:
    """Returns how a head was trained; nothing where it does not say."""
    path = directory / "training.json"
    record = json.loads(path.read_text()) if path.is_file() else {}
    record |= record.get("train", {})
    return {name: record[name] for name in TRAINED if name in record}
