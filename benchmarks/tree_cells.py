"""One cell of `benchmarks.tree`: a rule with a shape of drafts answers all prompts."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.tree_models import DraftTree, TreeHead, TreeTarget, lineage
from vllm_mars import verify_tree

# Children of a node, and levels, of a tree; a small tree has half as many children as nodes.
WIDTH, DEPTH = 10, 7
# So many prompts are read at once, which bounds the memory for the logits of their nodes.
LANES = 32
# Room for the nodes of a step.
MOST_NODES = 80


@dataclass(frozen=True)
class Rule:
    """What is accepted: theta, gap or price; at a temperature above 0 by draws."""

    metric: str
    value: float
    temperature: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `verify_tree`."""
        return {"theta": 1.0, **({} if self.metric == "strict" else {self.metric: self.value})}

    def __str__(self) -> str:
        name = "strict" if self.metric == "strict" else f"{self.metric} {self.value:g}"
        return f"{name}, T {self.temperature:g}" if self.temperature else name


STRICT = Rule("strict", 0.0)


@dataclass(frozen=True)
class DraftShape:
    """What is drafted: a chain, or a tree, of so many nodes."""

    kind: str
    nodes: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Width, depth and nodes, as `TreeHead.draft` takes them."""
        if self.kind == "chain":
            return 1, self.nodes, self.nodes
        return min(WIDTH, self.nodes // 2), DEPTH, self.nodes

    def __str__(self) -> str:
        return f"{self.kind} {self.nodes}"


@dataclass
class Answer:
    """One prompt's answer.

    Attributes:
        tokens: emitted, the first of them by the prompt's own last row, in no step.
        steps: verified.
        accepted: drafts of each step.
        lost: in units of 2**-LOSS_BITS nats.
        relaxed: tokens; where a request samples, all that were accepted without a draw.
        beyond_two: of these, those outside the two largest logits, where it samples.
        nll: of the tokens by the processed logits, in nats, where it samples.
        ranks: of the target's choice among the head's, at each rejection of a chain; 0 where the
            head cannot draft that token.
    """

    tokens: list[int]
    steps: int = 0
    accepted: list[int] = field(default_factory=list)
    lost: int = 0
    relaxed: int = 0
    beyond_two: int = 0
    nll: float = 0.0
    ranks: list[int] = field(default_factory=list)

    @property
    def repeated(self) -> int:
        """How many of its 4-grams stand earlier in it."""
        grams = [tuple(self.tokens[i : i + 4]) for i in range(len(self.tokens) - 3)]
        return len(grams) - len(set(grams))

    def score(self, tokens: torch.Tensor, logits: torch.Tensor, drawn: torch.Tensor) -> None:
        """Counts sampled tokens, by the rows that they came from and the draws of these."""
        own = logits.gather(1, tokens[:, None])
        self.nll -= float((own - logits.logsumexp(-1, keepdim=True)).sum())
        self.beyond_two += int((((logits > own).sum(-1) > 1) & (drawn != tokens)).sum())


class Study:
    """Prompts as token ids, and a target and a head that have read them.

    An answer ends with the step that reaches `max_tokens`.
    """

    def __init__(self, model: Path, head: Path, prompts: list[list[int]], max_tokens: int) -> None:
        from transformers import AutoTokenizer

        config = json.loads((head / "config.json").read_text())
        layers = tuple(config["eagle_aux_hidden_state_layer_ids"])
        rows, capacity = len(prompts), max(map(len, prompts)) + max_tokens + MOST_NODES
        self.target = TreeTarget(model, layers, rows, capacity)
        self.head = TreeHead(head, self.target.embedding, rows, capacity)
        self.max_tokens = max_tokens
        self.firsts: list[int] = []
        for row, prompt in enumerate(prompts):
            logits, states = self.target.fill(row, prompt)
            self.firsts.append(int(logits.argmax()))
            self.head.follow(row, 0, states, [*prompt[1:], self.firsts[-1]])
        self.protected = torch.zeros(len(self.target.lm_head), dtype=torch.bool)
        special = AutoTokenizer.from_pretrained(model).all_special_ids
        self.protected[[self.target.eos, *special]] = True
        self._begin = torch.tensor([len(prompt) for prompt in prompts]), self.head.last.clone()
        self.rewind()

    def rewind(self) -> None:
        """Forgets all but the prompts."""
        self.lengths, self.head.last = (begin.clone() for begin in self._begin)

    def draft(self, rows: list[int], tokens: list[int], shape: DraftShape) -> DraftTree:
        """Drafts for some prompts, behind the last token of each."""
        own = torch.tensor(rows)
        return self.head.draft(own, self.lengths[own], torch.tensor(tokens), *shape.sizes)

    def answer(self, rule: Rule, shape: DraftShape) -> list[Answer]:
        """Answers all prompts, each at its own pace."""
        self.rewind()
        answers = {row: Answer([token]) for row, token in enumerate(self.firsts)}
        while active := [
            row
            for row, answer in answers.items()
            if answer.tokens[-1] != self.target.eos and len(answer.tokens) < self.max_tokens
        ]:
            for first in range(0, len(active), LANES):
                some = active[first : first + LANES]
                self._step({row: answers[row] for row in some}, rule, shape)
        return list(answers.values())

    def _step(self, answers: dict[int, Answer], rule: Rule, shape: DraftShape) -> None:
        """Drafts, verifies and keeps what is accepted, for the answers of some rows."""
        rows, last = list(answers), [answer.tokens[-1] for answer in answers.values()]
        lengths = self.lengths[rows]
        drafts = self.draft(rows, last, shape)
        tokens = torch.cat([torch.tensor(last)[:, None], drafts.tokens], 1)
        count, width = tokens.shape
        sees = lineage(drafts.parents)
        read, states = self.target.read(torch.tensor(rows), lengths, tokens, sees)
        logits, draws = read.flatten(0, 1), None
        if rule.temperature:
            logits = logits / rule.temperature
            draws = logits.softmax(-1).multinomial(1)[:, 0]
        places = torch.arange(count * width).view(count, width)
        output = verify_tree(
            logits,
            drafts.tokens.flatten(),
            drafts.parents.int().flatten(),
            torch.arange(1, count + 1, dtype=torch.int32) * (width - 1),
            places[:, 0].contiguous(),
            places[:, 1:].flatten(),
            **rule.options,
            protected=self.protected,
            draws=draws,
        )
        for lane, (row, answer) in enumerate(answers.items()):
            # The root is the first of what was read.
            kept = [0, *(1 + node for node in output.path[lane].tolist() if node >= 0)]
            emitted = [token for token in output.output_token_ids[lane].tolist() if token >= 0]
            if drafts.logits is not None and len(kept) < width:
                guesses = drafts.logits[lane, len(kept) - 1]
                answer.ranks.append(rank_of(emitted[-1], guesses, self.head.draft_tokens))
            length = int(lengths[lane])
            self.target.keep(row, length, kept)
            self.head.follow(row, length, states[lane, kept], emitted)
            self.lengths[row] += len(kept)
            if self.target.eos in emitted:
                emitted = emitted[: emitted.index(self.target.eos) + 1]
            if draws is not None:
                from_rows = places[lane, kept[: len(emitted)]]
                answer.score(torch.tensor(emitted), logits[from_rows], draws[from_rows])
            answer.tokens += emitted
            answer.steps += 1
            answer.accepted.append(len(kept) - 1)
            answer.lost += int(output.lost[lane])
            answer.relaxed += int(output.num_relaxed[lane])


def counts(answers: Sequence[Answer], names: Iterable[str]) -> dict[str, list[Any]]:
    """Figures of each answer, by name, and how many "tokens" came from its steps."""
    found = {name: [getattr(answer, name) for answer in answers] for name in names}
    return {"tokens": [len(answer.tokens) - 1 for answer in answers], **found}


def rank_of(token: int, logits: torch.Tensor, draft_tokens: torch.Tensor) -> int:
    """The rank of a token among what the head drafts, 1 for its first choice, or 0."""
    place = int(torch.searchsorted(draft_tokens, token))
    if place == len(draft_tokens) or int(draft_tokens[place]) != token:
        return 0
    return 1 + int((logits > logits[place]).sum())
