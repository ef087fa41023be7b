"""Training data: the target's own answers, in shards, with the hidden states that a head is fed.

    DIRECTORY/00000.safetensors    tokens [n] int32, lengths [s], prompt_tokens [s],
                                   states [n, aux, hidden] bfloat16 (zero at each last token)
    DIRECTORY/00000.jsonl          the same answers as text; later shards take passages from it

An interrupted run resumes with the shard that is missing.
"""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from benchmarks.draft import prompts
from benchmarks.draft.recipe import Recipe
from benchmarks.draft.target import Answer, Target
from vllm_mars.local.prompts import PACKAGED, load_prompts
from vllm_mars.local.result_file import write_json

# Follow-ups and passages come from the shard this far back.
EARLIER = 2
# What a shard depends on, beside its number and the target.
MADE_BY = ("seed", "shard_prompts", "max_prompt_tokens", "max_tokens", "greedy_share")


class Sequence(NamedTuple):
    """One prompt with its answer.

    Attributes:
        tokens: [n] int64, prompt and answer; the last one ends the answer.
        prompt_tokens: how many of them are the prompt's.
        states: [n - 1, len(aux_layers), hidden]; states[i] is computed at tokens[i].
    """

    tokens: torch.Tensor
    prompt_tokens: int
    states: torch.Tensor


def make_data(
    directory: Path, recipe: Recipe, target: Target, tokenizer: Any, answer: Answer
) -> list[Path]:
    """Makes the shards that are missing, and returns all of them.

    Raises:
        ValueError: those that are there were made by another recipe.
    """
    made_by = {name: getattr(recipe, name) for name in MADE_BY}
    manifest = directory / "data.json"
    if not manifest.is_file():
        write_json(manifest, made_by)
    if (found := json.loads(manifest.read_text())) != made_by:
        raise ValueError(f"{directory} was made by {found}, not {made_by}; name another --work.")
    paths = [directory / f"{number:05d}.safetensors" for number in range(recipe.shards)]
    for number, path in enumerate(paths):
        if not path.is_file():
            save_shard(path, _make_shard(path, number, recipe, target, tokenizer, answer))
    return paths


def _make_shard(
    path: Path, number: int, recipe: Recipe, target: Target, tokenizer: Any, answer: Answer
) -> list[Sequence]:
    rng = random.Random(f"{recipe.seed} {number}")
    earlier: list[tuple[prompts.Messages, str]] = []
    if number >= EARLIER:
        with (path.parent / f"{number - EARLIER:05d}.jsonl").open(encoding="utf-8") as file:
            earlier = list(map(json.loads, file))
    measured = {turn for prompt in load_prompts(PACKAGED) for turn in prompt.turns}
    conversations: list[tuple[prompts.Messages, list[int]]] = []
    while len(conversations) < recipe.shard_prompts:
        messages = prompts.draw(rng, earlier)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        # A head that is measured on the demo's prompts must not be trained on them.
        if len(ids) <= recipe.max_prompt_tokens and messages[-1]["content"] not in measured:
            conversations.append((messages, list(ids)))
    # In this order the packaged head's conversations got their temperatures.
    conversations.sort(key=lambda pair: len(pair[1]))
    seed = rng.getrandbits(62)
    heat = [
        0.0 if rng.random() < recipe.greedy_share else rng.uniform(0.6, 1.0) for _ in conversations
    ]
    asked = [ids for _, ids in conversations]
    answers = answer(asked, heat, recipe.max_tokens, seed)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    lines = [
        json.dumps([messages, text], ensure_ascii=False) + "\n"
        for (messages, _), text in zip(conversations, texts, strict=True)
    ]
    path.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")
    return [read_states(target, prompt, new) for prompt, new in zip(asked, answers, strict=True)]


def read_states(target: Target, prompt: list[int], answer: list[int]) -> Sequence:
    """Returns a prompt and its answer with the target's states."""
    tokens = torch.tensor(prompt + answer)
    return Sequence(tokens, len(prompt), target.states(tokens[:-1]))


def save_shard(path: Path, answers: list[Sequence]) -> None:
    """Writes answers as a shard, complete or not at all."""
    states = []
    for answer in answers:
        states += [answer.states.bfloat16(), torch.zeros_like(answer.states[:1]).bfloat16()]
    content = {
        "tokens": torch.cat([answer.tokens for answer in answers]).int(),
        "lengths": torch.tensor([len(answer.tokens) for answer in answers]),
        "prompt_tokens": torch.tensor([answer.prompt_tokens for answer in answers]),
        "states": torch.cat(states),
    }
    unfinished = path.with_suffix(".tmp")
    save_file(content, unfinished)
    unfinished.replace(path)


class Shard:
    """One file of data: of each sequence its tokens, its states, and how many are the prompt's."""

    def __init__(self, path: Path) -> None:
        content = load_file(path)
        self.lengths: list[int] = content["lengths"].tolist()
        self.prompt_tokens: list[int] = content["prompt_tokens"].tolist()
        self.tokens = torch.split(content["tokens"].long(), self.lengths)
        self.states = torch.split(content["states"], self.lengths)
