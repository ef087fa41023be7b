"""Drafts of different quality on the same prompts: what does the margin add to each?

ngram        looks the next tokens up in the text so far
layers-N     `draft_model`: the target's first N layers, its norm and its output, untrained
random       an EAGLE-3 head with random weights
linear       a head that guesses by least squares, where training starts
half         the head in the middle of its training
trained      the head
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.draft import engine
from benchmarks.draft.evaluate import encode_prompts
from benchmarks.draft.export import export, load
from benchmarks.draft.head import new_head
from benchmarks.draft.start import start_linear
from benchmarks.draft.target import Target
from vllm_mars.local.draft_head import model_checksum, packaged_head
from vllm_mars.local.drafts import NGRAM_CONFIG
from vllm_mars.local.prompts import PACKAGED
from vllm_mars.local.provenance import describe_run

SCHEMA = 1
FIRST_LAYERS = 4


def climb(
    model: Path,
    work: Path,
    head: Path | None,
    *,
    prompts: Path | None,
    max_tokens: int,
    theta: float,
    num_speculative_tokens: int,
    known: dict[str, Any] | None = None,
    report: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measures each draft.

    Args:
        model: the target's directory.
        work: where the head was made; drafts made for the ladder are kept under `ladder/`.
        head: the trained head's directory; the packaged one by default.
        prompts: prompt file; the demo's by default.
        max_tokens: longest answer.
        theta: of the relaxed answers.
        num_speculative_tokens: drafts per step, the same for all.
        known: the result of a run that was interrupted; its drafts are not measured again if its
            `config` is the same.
        report: told the result after each draft.

    Returns:
        The result file's content: the head of a result, `config`, `drafts` by name.

    Raises:
        ValueError: there is no trained head.
    """
    trained = head or packaged_head()
    if trained is None:
        raise ValueError("there is no trained head; name one with --head, or make one first.")
    ids = encode_prompts(model, prompts or PACKAGED)
    drafts = make_drafts(model, work, trained, num_speculative_tokens)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        **describe_run(None),
        "config": {
            "model": model.name,
            "prompts": (prompts or PACKAGED).name,
            "max_tokens": max_tokens,
            "theta": theta,
            "num_speculative_tokens": num_speculative_tokens,
        },
        "drafts": {},
    }
    if known and known.get("config") == result["config"]:
        result["drafts"] = known["drafts"]
    for name, config in drafts.items():
        if name in result["drafts"]:
            continue
        figures = engine.measure(model, config, ids, max_tokens=max_tokens, theta=theta)
        for mode in figures.values():
            mode.pop("tokens")
        result["drafts"][name] = figures
        report(result)
    return result


def make_drafts(
    model: Path, work: Path, trained: Path, num_speculative_tokens: int
) -> dict[str, engine.Config]:
    """Makes the drafts that are missing and returns vLLM's speculative config of each."""
    layers, random, linear = (
        work / "ladder" / name for name in (f"layers-{FIRST_LAYERS}", "random", "linear")
    )
    if not layers.is_dir():
        first_layers(model, layers, FIRST_LAYERS)
    shards = sorted((work / "data").glob("[0-9]*.safetensors"))
    like = load(trained)
    target = Target(model, like.config.aux_layers)
    for directory in (random, linear):
        if directory.is_dir() or (directory == linear and not shards):
            continue
        one = new_head(
            target,
            like.draft_tokens,
            intermediate_size=like.config.intermediate_size,
            num_key_value_heads=like.config.num_key_value_heads,
        )
        if directory == linear:
            start_linear(one, target, shards[:1])
        export(
            one,
            directory,
            target_name=model.name,
            target_sha256=model_checksum(model),
            num_speculative_tokens=num_speculative_tokens,
        )
    found: dict[str, engine.Config] = {
        "ngram": dict(NGRAM_CONFIG),
        f"layers-{FIRST_LAYERS}": {"method": "draft_model", "model": str(layers)},
    }
    for name, directory in (
        ("random", random),
        ("linear", linear),
        ("half", work / "half"),
        ("trained", trained),
    ):
        if directory.is_dir():
            found[name] = {"method": "eagle3", "model": str(directory)}
    return {
        name: {**config, "num_speculative_tokens": num_speculative_tokens}
        for name, config in found.items()
    }


def first_layers(model: Path, directory: Path, count: int) -> None:
    """Writes a draft model of the target's first `count` layers, with its norm and output."""
    directory.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = count
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (model / name).is_file():
            shutil.copy(model / name, directory / name)
    kept = {}
    with safe_open(model / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            parts = name.split(".")
            if "layers" not in parts or int(parts[parts.index("layers") + 1]) < count:
                kept[name] = file.get_tensor(name)
    save_file(kept, directory / "model.safetensors", {"format": "pt"})


def table(result: dict[str, Any]) -> str:
    """Returns the result as a Markdown table."""
    lines = [
        "| draft | strict | by position | relaxed | by position | relaxed / strict |",
        "| --- | ---: | --- | ---: | --- | ---: |",
    ]
    for name, figures in result["drafts"].items():
        cells = [name]
        for mode in ("strict", "relaxed"):
            cells.append(f"{figures[mode]['mean_acceptance_length']:.2f}")
            cells.append(" ".join(f"{p:.2f}" for p in figures[mode]["acceptance_by_position"]))
        ratio = (
            figures["relaxed"]["mean_acceptance_length"]
            / figures["strict"]["mean_acceptance_length"]
        )
        lines.append(f"| {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines)
