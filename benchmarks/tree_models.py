"""A target and a head that draft and verify trees, for many prompts side by side.

Both keep what they know of each prompt in a row of one tensor, `capacity` tokens long.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional

from benchmarks.draft.export import load
from benchmarks.draft.head import Eagle3Head
from benchmarks.draft.target import Target


class DraftTree(NamedTuple):
    """What the head drafts for some prompts: nodes by falling probability, parents first.

    Attributes:
        tokens: `[rows, nodes]` int64.
        parents: `[rows, nodes]` int64, the index of each node's parent, or -1.
        logits: `[rows, depth, draft vocabulary]` of chains, what each of their tokens was chosen
            from; None for trees.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    logits: torch.Tensor | None


def lineage(parents: torch.Tensor) -> torch.Tensor:
    """Which of a root and its nodes are above each of them, and itself, `[rows, 1 + n, 1 + n]`."""
    rows, nodes = parents.shape
    above = torch.eye(1 + nodes, dtype=torch.bool).repeat(rows, 1, 1)
    for node in range(nodes):
        above[:, 1 + node] |= above[torch.arange(rows), 1 + parents[:, node]]
    return above


class TreeTarget(Target):
    """A target that reads some tokens of each prompt at a time, each on a path of its own."""

    def __init__(
        self, directory: Path, aux_layers: tuple[int, ...], rows: int, capacity: int
    ) -> None:
        super().__init__(directory, aux_layers, dtype=torch.float32)
        self.room = self.new_room(rows, capacity)
        self.eos = int(self.config.eos_token_id)

    @torch.inference_mode()
    def read(
        self, rows: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, sees: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads tokens behind those that are known of some prompts.

        Args:
            rows: `[rows]`, of the prompts.
            lengths: `[rows]`, how many tokens of each are known.
            tokens: `[rows, tokens]`.
            sees: bool `[rows, tokens, tokens]`, those on the path to each, and itself.

        Returns:
            The logits behind each, `[rows, tokens, vocab]`, and its states,
            `[rows, tokens, aux, hidden]`.
        """
        count = tokens.shape[1]
        slots = lengths[:, None] + torch.arange(count)
        room = self.room.at(rows, slots)
        mask = (torch.arange(room.used) < lengths[:, None])[:, None].repeat(1, count, 1)
        mask.scatter_(2, slots[:, None].expand(-1, count, -1), sees)
        size = self.config.hidden_size
        self._states = torch.empty(*tokens.shape, len(self.aux_layers), size)
        output = self.model(
            tokens,
            attention_mask=mask[:, None],
            position_ids=lengths[:, None] + sees.sum(-1) - 1,
            past_key_values=room,
            use_cache=True,
        )
        return functional.linear(output.last_hidden_state, self.lm_head), self._states

    def fill(self, row: int, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads a prompt; returns the logits behind its last token, and the states of all."""
        sees = torch.ones(1, len(tokens), len(tokens), dtype=torch.bool).tril()
        none = torch.tensor([0])
        logits, states = self.read(torch.tensor([row]), none, torch.tensor([tokens]), sees)
        return logits[0, -1], states[0]

    def keep(self, row: int, length: int, kept: list[int]) -> None:
        """Keeps these of the tokens that were read behind `length` others, in this order."""
        slots = length + torch.tensor(kept)
        own = self.room.content[:, :, row]
        own[..., length : length + len(kept), :] = own[..., slots, :]


class TreeHead(Eagle3Head):
    """An EAGLE-3 head that drafts trees, with the target's embedding, `[vocab, hidden]`."""

    def __init__(self, directory: Path, embedding: torch.Tensor, rows: int, capacity: int) -> None:
        read = load(directory)
        super().__init__(read.config, read.draft_tokens)
        self.load_state_dict(read.state_dict())
        self.requires_grad_(False)
        self.embedding = embedding
        heads, width = self.config.num_key_value_heads, self.config.head_dim
        self.room = torch.zeros(2, rows, heads, capacity, width)
        # Of each prompt what a draft begins with: f_0 of the last token.
        self.last = torch.zeros(rows, self.config.hidden_size)

    @torch.inference_mode()
    def follow(self, row: int, length: int, states: torch.Tensor, next_tokens: list[int]) -> None:
        """Takes in the states of tokens behind `length` others, and the token behind each."""
        combined = self.combine(states[None])
        inputs, _ = self._inputs(self.embedding[next_tokens][None], combined)
        end = length + len(next_tokens)
        known = self._keys_values(inputs, torch.arange(length, end))
        self.room[:, row, :, length:end] = torch.cat(known)
        self.last[row] = combined[0, -1]

    @torch.inference_mode()
    def draft(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        tokens: torch.Tensor,
        width: int,
        depth: int,
        nodes: int,
    ) -> DraftTree:
        """Drafts a tree for each of some prompts.

        Each level keeps the `width` nodes of the largest cumulated probability, each of them has
        `width` children, and of all nodes the most probable are the tree.

        Args:
            rows: `[rows]`, of the prompts.
            lengths: `[rows]`, how many tokens of each `follow` was told of.
            tokens: `[rows]`, the last token of each.
            width: 1 for a chain.
            depth: levels.
            nodes: of a tree, at most.
        """
        used = int(lengths.max())
        keys, values = self.room[:, rows, :, :used]
        seen = [(keys, values, (torch.arange(used) < lengths[:, None])[:, None, None])]
        hidden, token = self.last[rows][:, None], tokens[:, None]
        # Of each beam: its cumulated log probability, and its place among all candidates.
        total, place = torch.zeros(len(rows), 1), torch.full((len(rows), 1), -1)
        found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        all_logits = []
        for level in range(depth):
            positions = (lengths - 1 + level)[:, None].expand(token.shape)
            embedded = self.embedding[token]
            hidden = self._step(embedded, hidden, positions, seen, own=level > 0)
            logits = self.lm_head(self.norm(hidden))
            all_logits.append(logits[:, 0])
            best, ids = logits.log_softmax(-1).topk(width, -1)
            children = (total[..., None] + best).flatten(1)
            start = sum(part.shape[1] for part, _, _ in found)
            found.append(
                (children, self.draft_tokens[ids].flatten(1), place.repeat_interleave(width, 1))
            )
            total, chosen = children.topk(min(width, children.shape[1]), 1)
            beam = chosen // width
            token = found[-1][1].gather(1, chosen)
            place = start + chosen
            hidden = hidden.take_along_dim(beam[..., None], 1)
            lane = beam[:, None, :, None]
            seen[1:] = [
                (k.take_along_dim(lane, 2), v.take_along_dim(lane, 2), mask)
                for k, v, mask in seen[1:]
            ]
        totals, ids, places = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        # Stable, so that a child that is as probable as its parent stays behind it.
        order = totals.argsort(stable=True, dim=1, descending=True)
        kept = order[:, :nodes]
        # The node that each candidate is; behind them, where -1 leads, the root.
        node = functional.pad(order.argsort(1), (0, 1), value=-1)
        parents = node.gather(1, places.gather(1, kept) % node.shape[1])
        logits_of_chains = torch.stack(all_logits, 1) if width == 1 else None
        return DraftTree(ids.gather(1, kept), parents, logits_of_chains)
