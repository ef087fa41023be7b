"""One cell of `benchmarks.tree`: a rule with a shape of drafts answers all prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.tree_models import DraftTree, Place, TreeHead, TreeTarget
from vllm_mars import verify_tree
from vllm_mars.kernels.terms import Verdict, price_units
from vllm_mars.verify import judge_positions

# Children of a node, and levels, of a tree; a small tree has half as many children as nodes.
WIDTH, DEPTH = 10, 7


@dataclass(frozen=True)
class Rule:
    """What is accepted: theta, gap or price; at a temperature above 0 by draws."""

    metric: str
    value: float
    temperature: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `verify_tree`."""
        if self.metric == "strict":
            return {"theta": 1.0}
        return {"theta": 1.0, self.metric: self.value}

    def processed(self, logits: torch.Tensor) -> torch.Tensor:
        """What is verified of the target's logits."""
        return logits / self.temperature if self.temperature else logits

    def __str__(self) -> str:
        name = "strict" if self.metric == "strict" else f"{self.metric} {self.value:g}"
        return f"{name}, T {self.temperature:g}" if self.temperature else name


@dataclass(frozen=True)
class Shape:
    """What is drafted: a chain, or a tree, of so many nodes."""

    kind: str
    nodes: int

    def draft(self, head: TreeHead, rows: list[int], tokens: list[int]) -> list[DraftTree]:
        """Drafts for some prompts."""
        if self.kind == "chain":
            return head.draft(rows, tokens, 1, self.nodes, self.nodes)
        return head.draft(rows, tokens, min(WIDTH, self.nodes // 2), DEPTH, self.nodes)

    def __str__(self) -> str:
        return f"{self.kind} {self.nodes}"


@dataclass
class Answer:
    """One prompt's answer so far, and the step that it is in.

    Attributes:
        row: of the prompt in the tensors.
        tokens: emitted, the first of them by the prompt's own last row, in no step.
        steps: verified.
        accepted: drafts of each step.
        lost: in units of 2**-LOSS_BITS nats.
        relaxed: tokens; where a request samples, all that were accepted without a draw.
        beyond_two: of these, those outside the two largest logits, where it samples.
        nll: of the tokens by the processed logits, in nats, where it samples.
        ranks: of the target's choice among the head's, at each rejection of a chain; 0 where the
            head cannot draft that token.
        tree: drafted in this step.
        order: of its nodes those that were read, the root (-1) first.
    """

    row: int
    tokens: list[int]
    steps: int = 0
    accepted: list[int] = field(default_factory=list)
    lost: int = 0
    relaxed: int = 0
    beyond_two: int = 0
    nll: float = 0.0
    ranks: list[int] = field(default_factory=list)
    done: bool = False
    tree: DraftTree = field(default_factory=lambda: DraftTree([], []))
    order: list[int] = field(default_factory=list)
    frontier: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    # Of each reachable node: what the path to it has lost.
    losses: dict[int, int] = field(default_factory=dict)
    best: int = 0

    def begin(self, tree: DraftTree) -> None:
        """Begins a step."""
        self.tree, self.order, self.frontier = tree, [], [-1]
        self.logits, self.draws, self.states = [], [], []
        self.losses, self.best = {-1: 0}, 0

    def places(self, length: int) -> list[Place]:
        """The frontier, to be read behind `length` committed tokens."""
        slots = {node: length + i for i, node in enumerate([*self.order, *self.frontier])}
        found = []
        for node in self.frontier:
            above = []
            parent = node
            while parent != -1:
                parent = self.tree.parents[parent]
                above.append(slots[parent])
            token = self.tokens[-1] if node < 0 else self.tree.tokens[node]
            found.append(Place(self.row, token, slots[node], length + len(above), tuple(above)))
        return found

    def children(self, nodes: list[int]) -> list[int]:
        """Of some nodes."""
        return [i for i, parent in enumerate(self.tree.parents) if parent in nodes]

    def deepest(self) -> list[int]:
        """The depth of the deepest node at or below each."""
        deepest = list(self.tree.depths)
        for node in reversed(range(len(deepest))):
            parent = self.tree.parents[node]
            if parent >= 0:
                deepest[parent] = max(deepest[parent], deepest[node])
        return deepest


def reach(
    answers: list[Answer],
    logits: torch.Tensor,
    choices: torch.Tensor,
    rule: Rule,
    protected: torch.Tensor,
) -> None:
    """Finds the nodes to read next: those that the rule can still reach from what was read.

    With a price a node is left out where no path through it can be worth as much as one that is
    known, even if nothing below it loses anything.

    Args:
        answers: whose frontier has been read.
        logits: of the frontiers, processed, in the order of the answers.
        choices: of each of their rows, what strict verification accepts: the argmax, or the draw.
        rule: what is accepted.
        protected: bool `[vocab]`.
    """
    children, rows, at = [], [], 0
    for answer in answers:
        for node in answer.children(answer.frontier):
            children.append((answer, node))
            rows.append(at + answer.frontier.index(answer.tree.parents[node]))
        at += len(answer.frontier)
        answer.order += answer.frontier
        answer.frontier = []
    if not children:
        return
    ids = [answer.tree.tokens[node] for answer, node in children]
    target_rows, drafts = torch.tensor(rows), torch.tensor(ids)
    judged = judge_positions(
        *(logits, drafts, torch.tensor([len(ids)], dtype=torch.int32)),
        **rule.options,
        protected=protected,
        target_rows=target_rows,
    )
    assert judged.losses is not None
    choice = choices[target_rows]
    first = (choice == drafts).tolist()
    may_pay = (~(protected[drafts] | protected[choice])).tolist()
    # Where a request samples, each position stands alone.
    price = price_units(rule.value) if rule.metric == "price" and not rule.temperature else 0
    verdicts, losses = judged.verdicts.tolist(), judged.losses.tolist()
    deepest = {answer.row: answer.deepest() for answer in answers}
    candidates = []
    for i, (answer, node) in enumerate(children):
        if first[i] or (may_pay[i] if price else verdicts[i] == Verdict.RELAXED):
            lost = answer.losses[answer.tree.parents[node]] + (0 if first[i] else losses[i])
            answer.losses[node] = lost
            answer.best = max(answer.best, price * answer.tree.depths[node] - lost)
            candidates.append((answer, node))
    for answer, node in candidates:
        if price * deepest[answer.row][node] - answer.losses[node] >= answer.best or not price:
            answer.frontier.append(node)


def finish(
    answer: Answer,
    rule: Rule,
    target: "TreeTarget | Recorded",
    head: TreeHead,
    protected: torch.Tensor,
) -> None:
    """Verifies a step whose reachable nodes are read, and keeps the path that is accepted."""
    tree, index = answer.tree, {node: i for i, node in enumerate(answer.order)}
    logits = rule.processed(torch.stack(answer.logits))
    output = verify_tree(
        logits,
        torch.tensor(tree.tokens, dtype=torch.int32),
        torch.tensor(tree.parents, dtype=torch.int32),
        torch.tensor([len(tree.tokens)], dtype=torch.int32),
        torch.tensor([0]),
        # The row of a node that cannot be reached is never looked at to any effect.
        torch.tensor([index.get(node, 0) for node in range(len(tree.tokens))]),
        **rule.options,
        protected=protected,
        draws=torch.tensor(answer.draws) if rule.temperature else None,
    )
    path = [node for node in output.path[0].tolist() if node >= 0]
    emitted = [token for token in output.output_token_ids[0].tolist() if token >= 0]
    assert all(node in index for node in path), "an accepted node was never read"
    if tree.logits is not None and len(path) < len(tree.tokens):
        answer.ranks.append(rank_of(emitted[-1], tree.logits[len(path)], head.draft_tokens))
    kept = [-1, *path]
    target.commit(answer.row, [target.lengths[answer.row] + index[node] for node in kept])
    states = torch.stack([answer.states[index[node]] for node in kept])
    head.follow(answer.row, states, emitted)
    if target.eos in emitted:
        emitted = emitted[: emitted.index(target.eos) + 1]
    if rule.temperature:
        rows = [index[node] for node in kept[: len(emitted)]]
        own = logits[rows].gather(1, torch.tensor(emitted)[:, None])
        answer.nll -= float((own - logits[rows].logsumexp(-1, keepdim=True)).sum())
        beyond_two = ((logits[rows] > own).sum(-1) > 1).tolist()
        drawn = [answer.draws[row] == token for row, token in zip(rows, emitted, strict=True)]
        answer.beyond_two += sum(b and not d for b, d in zip(beyond_two, drawn, strict=True))
    answer.tokens += emitted
    answer.steps += 1
    answer.accepted.append(len(path))
    answer.lost += int(output.lost)
    answer.relaxed += int(output.num_relaxed)


def rank_of(token: int, logits: torch.Tensor, draft_tokens: torch.Tensor) -> int:
    """The rank of a token among what the head drafts, 1 for its first choice, or 0."""
    place = int(torch.searchsorted(draft_tokens, token))
    if place == len(draft_tokens) or int(draft_tokens[place]) != token:
        return 0
    return 1 + int((logits > logits[place]).sum())


class Recorded:
    """A target whose answers are known: what it would read of them is looked up.

    Args:
        texts: of each prompt: the tokens of the prompt and of the target's own answer.
        states: of each prompt: `[tokens - 1, aux, hidden]`, behind each of them but the last.
        prompt_tokens: of each prompt.
        vocab: size of the vocabulary.
        eos: the token that ends an answer.
    """

    def __init__(
        self,
        texts: list[list[int]],
        states: list[torch.Tensor],
        prompt_tokens: list[int],
        vocab: int,
        eos: int,
    ) -> None:
        self.texts, self.states, self.vocab, self.eos = texts, states, vocab, eos
        self.lengths = list(prompt_tokens)

    def read(self, places: Sequence[Place]) -> tuple[torch.Tensor, torch.Tensor]:
        """As `TreeTarget.read`, of places on the answers; the largest logit alone is right."""
        logits = torch.zeros(len(places), self.vocab)
        for row, place in zip(logits, places, strict=True):
            text = self.texts[place.row]
            row[text[place.position + 1] if place.position + 1 < len(text) else self.eos] = 1.0
        states = [
            self.states[place.row][min(place.position, len(self.states[place.row]) - 1)]
            for place in places
        ]
        return logits, torch.stack(states)

    def commit(self, row: int, slots: Sequence[int]) -> None:
        """Keeps so many tokens."""
        self.lengths[row] += len(slots)


def run_cell(
    target: TreeTarget | Recorded,
    head: TreeHead,
    firsts: list[int],
    rule: Rule,
    shape: Shape,
    max_tokens: int,
    protected: torch.Tensor,
) -> list[Answer]:
    """Answers all prompts, each at its own pace; rows of the tensors hold the prompts.

    Args:
        target, head: that have read the prompts.
        firsts: the first token of each answer.
        rule, shape: the cell.
        max_tokens: an answer ends with the step that reaches as many.
        protected: bool `[vocab]`.
    """
    answers = [Answer(row, [token]) for row, token in enumerate(firsts)]
    for answer in answers:
        answer.done = answer.tokens[-1] == target.eos
    while active := [answer for answer in answers if not answer.done]:
        idle = [answer for answer in active if not answer.frontier]
        if idle:
            rows, last = [answer.row for answer in idle], [answer.tokens[-1] for answer in idle]
            for answer, tree in zip(idle, shape.draft(head, rows, last), strict=True):
                answer.begin(tree)
        places = [(a, place) for a in active for place in a.places(target.lengths[a.row])]
        logits, states = target.read([place for _, place in places])
        processed = rule.processed(logits)
        choices = (
            processed.softmax(-1).multinomial(1)[:, 0] if rule.temperature else logits.argmax(-1)
        )
        for (answer, _), row, choice, state in zip(places, logits, choices, states, strict=True):
            answer.logits.append(row)
            answer.draws.append(int(choice))
            answer.states.append(state)
        reach(active, processed, choices, rule, protected)
        for answer in active:
            if not answer.frontier:
                finish(answer, rule, target, head, protected)
                answer.done = answer.tokens[-1] == target.eos or len(answer.tokens) >= max_tokens
    return answers
