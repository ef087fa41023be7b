"""How many guesses of a head the target takes: offline on its own answers, and in vLLM.

Offline, the walk of strict verification is followed exactly: a step drafts K tokens, the target
takes the first a of them that are its own and adds one, and the next step starts there. (A mean
over all tokens would flatter the head: easy stretches are walked in long strides, so that more
steps start in hard ones.) A relaxed walk leaves the target's own text and needs vLLM.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.draft.export import load
from benchmarks.draft.head import Eagle3Head
from benchmarks.draft.target import Sequence, Target
from benchmarks.draft.train import Batch
from vllm_mars.local.draft_head import check_head
from vllm_mars.local.prompts import load_prompts
from vllm_mars.local.provenance import describe_run

SCHEMA = 1


@dataclass
class Walk:
    """Counts of verification.

    Attributes:
        drafts: steps that drafted.
        accepted: how often each draft position was accepted.
    """

    drafts: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Mean acceptance length, with the token that each step adds."""
        return 1 + sum(self.accepted) / max(1, self.drafts)

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as JSON values."""
        return {
            "drafts": self.drafts,
            "mean_acceptance_length": round(self.length, 4),
            "acceptance_by_position": [
                round(count / max(1, self.drafts), 4) for count in self.accepted
            ],
        }

    def take(self, right: list[list[bool]]) -> None:
        """Follows one answer.

        Args:
            right: per token that can be drafted from, whether each guess is the target's.
        """
        if not self.accepted:
            self.accepted = [0] * len(right[0])
        place = 0
        while place < len(right):
            taken = 0
            while taken < len(right[place]) and right[place][taken]:
                self.accepted[taken] += 1
                taken += 1
            self.drafts += 1
            place += taken + 1


@torch.inference_mode()
def right_guesses(
    head: Eagle3Head, target: Target, sequence: Sequence, steps: int
) -> list[list[bool]]:
    """Drafts from every token of an answer.

    Returns:
        [anchors][steps]: whether a guess is the answer's token. A guess after a wrong one is made
        from the true tokens; verification never gets to it.
    """
    aux = [target.aux_layers.index(layer) for layer in head.config.aux_layers]
    batch = Batch.of(
        [sequence.tokens],
        [torch.cat([sequence.states, torch.zeros_like(sequence.states[:1])])],
        [sequence.prompt_tokens],
        steps,
        target.device,
    )
    embeddings = target.embedding[batch.tokens[:, 1:]]
    columns = []
    for step, hidden in enumerate(
        head.steps(batch.states[:, :, aux], embeddings, batch.anchors, steps)
    ):
        guess = head.draft_tokens[head.lm_head(hidden[0]).argmax(-1)]
        true = batch.tokens[0, batch.anchors[0] + 2 + step]
        columns.append((guess == true) & (batch.valid[0] > step))
    rows: list[list[bool]] = torch.stack(columns, 1).tolist()
    return rows


def evaluate_offline(
    head: Eagle3Head, target: Target, sequences: Iterable[Sequence], steps: int
) -> Walk:
    """Returns what strict verification takes of K = `steps` drafts on the given answers."""
    walk = Walk()
    for sequence in sequences:
        if len(sequence.tokens) - sequence.prompt_tokens >= 2:
            walk.take(right_guesses(head, target, sequence, steps))
    return walk


def evaluate_heads(
    model: Path, heads: list[Path], prompts: Path, max_tokens: int, steps: int
) -> dict[str, Any]:
    """Compares heads offline on the target's greedy answers, in float32.

    Args:
        model: the target's directory.
        heads: directories of heads that are fed the same hidden states.
        prompts: prompt file; of each conversation the first turn is asked.
        max_tokens: longest answer.
        steps: drafts per step.

    Returns:
        The result file's content; `heads` has the figures of each by its directory's name.

    Raises:
        ValueError: a head is damaged or for another target.
    """
    for directory in heads:
        check_head(directory, model)
    read = {directory.name: load(directory) for directory in heads}
    layers = {layer for head in read.values() for layer in head.config.aux_layers}
    target = Target(model, tuple(sorted(layers)), dtype=torch.float32)
    ids = sorted(encode_prompts(model, prompts), key=len)
    answers = list(target.answer(ids, [0.0] * len(ids), max_tokens, torch.Generator()))
    return {
        "schema": SCHEMA,
        **describe_run(None),
        "config": {
            "model": model.name,
            "prompts": prompts.name,
            "max_tokens": max_tokens,
            "num_speculative_tokens": steps,
        },
        "heads": {
            name: {
                "steps": _trained_steps(directory),
                **evaluate_offline(read[name], target, answers, steps).to_json(),
            }
            for name, directory in zip(read, heads, strict=True)
        },
    }


def encode_prompts(model: Path, prompts: Path) -> list[list[int]]:
    """Returns the token ids of each conversation's first turn, with the start of the answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.turns[0]}],
            add_generation_prompt=True,
            tokenize=True,
        )["input_ids"]
        for prompt in load_prompts(prompts)
    ]


def _trained_steps(directory: Path) -> int:
    """Returns how many steps a head was trained; 0 where nothing says so."""
    path = directory / "training.json"
    return int(json.loads(path.read_text())["steps"]) if path.is_file() else 0
