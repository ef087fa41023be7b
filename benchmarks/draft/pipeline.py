"""From a target to a head: data, training, export and evaluation, each stage going on where it was.

WORK/data/      shards (data.py)
WORK/train/     checkpoint and log (train.py)
WORK/half/      the head after half of the steps, to compare with
OUTPUT/         the head, with config.json, training.json and README.md
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import torch

from benchmarks.draft.data import DataOptions, make_shard, shard_path, wait_for, write_manifest
from benchmarks.draft.export import export, load, megabytes
from benchmarks.draft.head import Eagle3Head, new_head
from benchmarks.draft.prompts import Messages
from benchmarks.draft.start import start_linear
from benchmarks.draft.target import Target
from benchmarks.draft.train import Trainer, TrainOptions, choose_draft_tokens
from vllm_mars.local.draft_head import check_head, model_checksum
from vllm_mars.local.packaged_model import cache_root
from vllm_mars.local.provenance import git_commit
from vllm_mars.local.result_file import write_json

# The first to be made: shards that the draft vocabulary is counted in.
FIRST_SHARDS = 8
# Losses and accuracies of training are given as their means over so many steps.
LAST_STEPS = 32


@dataclass(frozen=True)
class Setting:
    """Everything that makes a head.

    Attributes:
        device: "cpu" or "cuda".
        data: the data.
        train: the training.
        draft_vocab_size: tokens that the head can guess.
        fed_layers: hidden states that it is fed, of those in the data; None for all.
        intermediate_size: width of its MLP; None for the target's.
        num_speculative_tokens: drafts per step that the head's config names.
        max_mb: a larger head is refused.
    """

    device: str
    data: DataOptions
    train: TrainOptions
    draft_vocab_size: int = 4096
    fed_layers: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    num_speculative_tokens: int = 4
    max_mb: float = 20.0


SETTINGS = {
    "cpu": Setting("cpu", DataOptions(shards=12), TrainOptions(shards=12, epochs=3.0)),
    "gpu": Setting(
        "cuda",
        DataOptions(shards=32, shard_prompts=2048, batch=1024),
        TrainOptions(shards=32, epochs=4, steps_ahead=5, batch=64, ramp=0.0),
    ),
}


def for_target(setting: Setting, model: Path) -> Setting:
    """Returns the setting with the hidden states of a target of any depth.

    The first three are those that vLLM takes by default: an early, a middle and a late one. The
    last is what the target's own distribution follows from.
    """
    count = _depth(model)
    layers = tuple(sorted({min(2, count), count // 2, max(0, count - 3), count}))
    return replace(setting, data=replace(setting.data, aux_layers=layers))


def read_target(model: Path, setting: Setting) -> Target:
    """Reads the target, with the hidden states that the setting names.

    Raises:
        ValueError: the target, or the data, has no such hidden states, or the head would be too
            large.
    """
    kept, fed = setting.data.aux_layers, setting.fed_layers or setting.data.aux_layers
    last = _depth(model)
    for name, layers in (("aux_layers", kept), ("fed_layers", fed)):
        if list(layers) != sorted(set(layers) & set(range(last + 1))) or last not in layers:
            raise ValueError(
                f"{name}={layers} must ascend from 0 or more to {last}, the target's last state."
            )
    if not set(fed) <= set(kept):
        raise ValueError(f"fed_layers={fed} are not all in the data's aux_layers={kept}.")
    dtype = getattr(torch, setting.data.dtype)
    target = Target(model, kept, device=setting.device, dtype=dtype)
    some_tokens = torch.arange(target.config.vocab_size)[: setting.draft_vocab_size]
    size = megabytes(_new_head(setting, target, some_tokens))
    if size > setting.max_mb:
        raise ValueError(
            f"a head of draft_vocab_size={setting.draft_vocab_size} has {size:.1f} MB, above "
            f"max_mb={setting.max_mb:g}; take fewer draft tokens or layers, or a smaller "
            "intermediate_size."
        )
    return target


def _new_head(setting: Setting, target: Target, draft_tokens: torch.Tensor) -> Eagle3Head:
    return new_head(
        target,
        draft_tokens,
        aux_layers=setting.fed_layers,
        intermediate_size=setting.intermediate_size,
        seed=setting.train.seed,
    )


def _depth(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["num_hidden_layers"])


def make_data(
    work: Path,
    model: Path,
    setting: Setting,
    target: Target,
    answered: Callable[[], object] = lambda: None,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Makes the shards that are missing, and calls `answered` after each answer.

    A part (i, n) is only the shards whose number is i modulo n, so that n processes share the work;
    n is 1 or 2.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(messages: Messages) -> list[int]:
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        )

    def decode(tokens: torch.Tensor) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    write_manifest(work / "data", setting.data, model_checksum(model))
    for number in range(part[0], setting.data.shards, part[1]):
        make_shard(work / "data", number, setting.data, target, encode, decode, answered)


def work_directory(model: Path) -> Path:
    """Returns where a model's head is made by default."""
    return cache_root() / f"draft-{model.name}"


def train(
    work: Path,
    model: Path,
    setting: Setting,
    target: Target,
    report: Callable[[dict[str, Any]], None] = lambda figures: None,
) -> Trainer:
    """Trains to the end of the plan, with the half-trained head on the way.

    Raises:
        ValueError: the data or the checkpoint is of other options, or the head to start from does
            not fit.
    """
    write_manifest(work / "data", setting.data, model_checksum(model))
    path_of = partial(shard_path, work / "data")
    if setting.train.start_from is None:
        numbers = range(min(FIRST_SHARDS, setting.data.shards))
        first = [wait_for(path_of(number)) for number in numbers]
        tokens = choose_draft_tokens(first, setting.draft_vocab_size, target.config.vocab_size)
        head = _new_head(setting, target, tokens)
        start_linear(head, target, first[:1])
    else:
        head = _given_head(Path(setting.train.start_from), model, target)
    prompts = setting.data.shard_prompts
    trainer = Trainer(work / "train", setting.train, target, head, path_of, prompts)
    trainer.resume()
    half = trainer.total // 2
    if trainer.done <= half:
        trainer.run(half, report)
        write(trainer, work / "half", model, setting)
    trainer.run(report=report)
    return trainer


def _given_head(directory: Path, model: Path, target: Target) -> Eagle3Head:
    """A head to train on.

    Raises:
        ValueError: it is damaged, for another target, or fed with states that the data lacks.
    """
    check_head(directory, model)
    head = load(directory)
    if not set(head.config.aux_layers) <= set(target.aux_layers):
        raise ValueError(
            f"start_from={directory} is fed with layers {head.config.aux_layers}, which are not "
            f"all in the data's aux_layers={target.aux_layers}; make the data with them."
        )
    return head.to(target.device)


def write(trainer: Trainer, directory: Path, model: Path, setting: Setting) -> None:
    """Exports a trainer's head, with training.json and its model card beside it."""
    export(
        trainer.head,
        directory,
        target_name=model.name,
        target_sha256=model_checksum(model),
        num_speculative_tokens=setting.num_speculative_tokens,
    )
    started = setting.train.start_from and Path(setting.train.start_from).name
    record = {
        "target": {"name": model.name, "sha256": model_checksum(model)},
        "device": setting.device,
        "data": asdict(setting.data) | trainer.data_tokens(),
        "train": asdict(setting.train) | {"start_from": started},
        "steps": trainer.done,
        "planned_steps": trainer.total,
        "seen_tokens": trainer.log_sum("tokens"),
        "training_seconds": trainer.log_sum("seconds"),
        "last_steps": trainer.log_means(LAST_STEPS),
        "draft_vocab_size": len(trainer.head.draft_tokens),
        "aux_layers": trainer.head.config.aux_layers,
        "megabytes": round(megabytes(trainer.head), 1),
        "parameters": sum(parameter.numel() for parameter in trainer.head.parameters()),
        "git_commit": git_commit(),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
    }
    write_json(directory / "training.json", record)
    template = Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8")
    card = jinja2.Template(template, keep_trailing_newline=True).render(record)
    (directory / "README.md").write_text(card)
