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

from benchmarks.draft.head import Eagle3Head
from benchmarks.draft.target import Sequence, Target
from benchmarks.draft.train import Batch


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


def read_server(path: Path) -> Walk:
    """Returns the counts of the strict server of a demo's result file."""
    strict = json.loads(path.read_text())["strict"]
    return Walk(sum(answer["drafts"] for answer in strict["answers"]), [strict["accepted_tokens"]])
