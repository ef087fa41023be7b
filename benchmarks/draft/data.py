"""Training data: the target's own answers, in shards, with the hidden states that a head is fed.

    DIRECTORY/00000.safetensors    tokens [n] int32, lengths [s], prompt_tokens [s],
                                   states [n, aux, hidden] bfloat16 (zero at each last token)
    DIRECTORY/00000.jsonl          the same answers as text; later shards take passages from it
    DIRECTORY/data.json            what made them

A shard depends on the seed and its number alone, so that an interrupted run goes on where it was,
and several workers make different shards of the same data.
"""

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.draft import prompts
from benchmarks.draft.target import Sequence, Target
from vllm_mars.local.packaged_model import sha256
from vllm_mars.local.prompts import PACKAGED, load_prompts
from vllm_mars.local.result_file import write_json

# Follow-ups and passages come from the shard this far back, which the same worker of one or two
# has made.
EARLIER = 2
MANIFEST = "data.json"
# The share of a prompt file's prompts among all, where one is given.
FILE_SHARE = 0.5
WAIT_SECONDS = 5.0


@dataclass(frozen=True)
class DataOptions:
    """What to make.

    Attributes:
        seed: the same seed gives the same prompts and, on the same machine and up to rounding, the
            same answers.
        shards: how many.
        shard_prompts: conversations in a shard.
        batch: how many are answered at once.
        max_prompt_tokens: longer conversations are drawn again.
        max_tokens: longest answer.
        greedy_share: share of answers at temperature 0, in [0, 1]; the others at 0.6 to 1, and
            where the target writes a task for itself at 1.
        aux_layers: hidden states to keep, as `Target` counts them; the last one must be
            num_hidden_layers, from which the target's distribution follows.
        dtype: of the linear layers, also in training; "bfloat16" is faster only on an accelerator
            or a core with AVX-512 BF16, elsewhere "float32" is.
        prompt_file: JSON lines of further prompts, or None.
    """

    seed: int = 0
    shards: int = 12
    shard_prompts: int = 512
    batch: int = 128
    max_prompt_tokens: int = 384
    max_tokens: int = 160
    greedy_share: float = 0.7
    aux_layers: tuple[int, ...] = (2, 15, 27, 30)
    dtype: str = "bfloat16"
    prompt_file: str | None = None


Encode = Callable[[prompts.Messages], list[int]]
Decode = Callable[[torch.Tensor], str]


def make_shard(
    directory: Path,
    number: int,
    options: DataOptions,
    target: Target,
    encode: Encode,
    decode: Decode,
    answered: Callable[[], object] = lambda: None,
) -> bool:
    """Makes one shard unless it is there; the shard EARLIER before it must be.

    Args:
        directory: where the shards are.
        number: the shard's.
        options: what to make.
        target: whose answers.
        encode: conversation to token ids, with the start of the answer.
        decode: token ids of an answer to text.
        answered: called after each answer.

    Returns:
        Whether it had to be made.
    """
    final = shard_path(directory, number)
    if final.is_file():
        return False
    rng = random.Random(f"{options.seed} {number}")
    conversations = _draw(directory, number, options, encode, rng)
    # Padding is little where the lengths of a batch are alike.
    conversations.sort(key=lambda pair: len(pair[1]))
    generator = torch.Generator(target.device).manual_seed(rng.getrandbits(62))
    answers: list[Sequence] = []
    lines: list[str] = []
    for first in range(0, len(conversations), options.batch):
        batch = conversations[first : first + options.batch]
        messages, ids = zip(*batch, strict=True)
        heat = [_temperature(one, options, rng) for one in messages]
        for answer in target.answer(list(ids), heat, options.max_tokens, generator):
            answers.append(answer)
            line = {
                "messages": messages[answer.index],
                "answer": decode(answer.tokens[answer.prompt_tokens :]),
                "temperature": heat[answer.index],
            }
            lines.append(json.dumps(line, ensure_ascii=False))
            answered()
    with replacing(final.with_suffix(".jsonl")) as unfinished:
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
    save_shard(final, answers)
    return True


def shard_path(directory: Path, number: int) -> Path:
    """Returns the path of a shard."""
    return directory / f"{number:05d}.safetensors"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write to, which then takes a file's place: complete or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


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
    with replacing(path) as unfinished:
        save_file(content, unfinished)


def write_manifest(directory: Path, options: DataOptions, target_sha256: str) -> None:
    """Writes what makes the data, or compares it with what made the shards that are there.

    Raises:
        ValueError: the directory holds other data.
    """
    wanted = {**asdict(options), "target_sha256": target_sha256}
    wanted["templates_sha256"] = sha256(prompts.TEMPLATES)
    if options.prompt_file:
        wanted["prompt_file_sha256"] = sha256(Path(options.prompt_file))
    wanted.pop("shards")  # More shards of the same data are welcome.
    wanted = json.loads(json.dumps(wanted))
    path = directory / MANIFEST
    if not path.is_file():
        write_json(path, wanted)
        return
    check_same(f"{directory} holds data made", json.loads(path.read_text()), wanted)


def check_same(what: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compares the options of what is there with those that are asked for.

    Raises:
        ValueError: they differ; the message begins with `what`, and names the option.
    """
    for name in wanted.keys() | found.keys():
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"{what} with {name}={found.get(name)!r}, not {wanted.get(name)!r}; name another "
                "directory, or remove this one."
            )


class Shard:
    """One file of data; tensors are read when asked for.

    Attributes:
        lengths: tokens of each sequence.
        prompt_tokens: how many of them are the prompt's.
    """

    def __init__(self, path: Path) -> None:
        file: Any = safe_open(path, framework="pt")
        self._tensor: Callable[[str], Any] = file.get_tensor
        self.lengths: list[int] = self._tensor("lengths").tolist()
        self.prompt_tokens: list[int] = self._tensor("prompt_tokens").tolist()

    def tokens(self) -> list[torch.Tensor]:
        """Returns the tokens of each sequence."""
        return self._split("tokens", torch.int64)

    def read(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the tokens and the states of each sequence."""
        return self.tokens(), self._split("states", torch.bfloat16)

    def _split(self, name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        return list(self._tensor(name).to(dtype).split(self.lengths))


def wait_for(path: Path) -> Path:
    """Returns a shard's path once it is there: another process may still make it."""
    if not path.is_file():
        print(f"waiting for {path}", file=sys.stderr)
    while not path.is_file():
        time.sleep(WAIT_SECONDS)
    return path


def finished_shards(directory: Path) -> list[Path]:
    """Returns the shards that are complete, in the order of their numbers."""
    return sorted(directory.glob("[0-9]*.safetensors"))


def _temperature(messages: prompts.Messages, options: DataOptions, rng: random.Random) -> float:
    if prompts.asks_for_a_task(messages):
        return 1.0
    return 0.0 if rng.random() < options.greedy_share else rng.uniform(0.6, 1.0)


def _draw(
    directory: Path, number: int, options: DataOptions, encode: Encode, rng: random.Random
) -> list[tuple[prompts.Messages, list[int]]]:
    earlier: list[tuple[prompts.Messages, str]] = []
    if number >= EARLIER:
        path = shard_path(directory, number - EARLIER).with_suffix(".jsonl")
        with path.open(encoding="utf-8") as file:
            earlier = [(line["messages"], line["answer"]) for line in map(json.loads, file)]
    further = file_prompts(Path(options.prompt_file)) if options.prompt_file else []
    measured = measured_turns()
    conversations: list[tuple[prompts.Messages, list[int]]] = []
    while len(conversations) < options.shard_prompts:
        if further and rng.random() < FILE_SHARE:
            messages = [{"role": "user", "content": rng.choice(further)}]
        else:
            messages = prompts.draw(rng, earlier)
        ids = encode(messages)
        if len(ids) <= options.max_prompt_tokens and messages[-1]["content"] not in measured:
            conversations.append((messages, ids))
    return conversations


def file_prompts(path: Path) -> list[str]:
    """Returns the first turns of a prompt file.

    Raises:
        ValueError: the file cannot be read, or holds a prompt that the demo measures on.
    """
    measured = measured_turns()
    texts = []
    for prompt in load_prompts(path):
        if measured & set(prompt.turns):
            raise ValueError(
                f"prompts={path}: {prompt.id} is one of the demo's prompts, on which a draft must "
                "not be trained; remove it."
            )
        texts.append(prompt.turns[0])
    return texts


def measured_turns() -> set[str]:
    """Returns what the demo asks: a draft that is measured on it must not be trained on it."""
    return {turn for prompt in load_prompts(PACKAGED) for turn in prompt.turns}
