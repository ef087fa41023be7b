"""A target and a head that draft and verify trees, for many prompts side by side.

Both keep what they know of a prompt in a row of one tensor, `capacity` tokens long. A call reads
tokens of several prompts as one flat batch; only attention goes prompt by prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.draft.export import load
from benchmarks.draft.head import Eagle3Head
from benchmarks.draft.target import Target


@dataclass
class DraftTree:
    """What the head drafts for one prompt: nodes by falling probability, parents first.

    Attributes:
        tokens: of each node.
        parents: the index of each node's parent, or -1.
        logits: `[depth, draft vocabulary]` of a chain, what each of its tokens was chosen from;
            None for a tree.
    """

    tokens: list[int]
    parents: list[int]
    logits: torch.Tensor | None = None
    depths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.depths = []
        for parent in self.parents:
            self.depths.append(1 + (self.depths[parent] if parent >= 0 else 0))


@dataclass(frozen=True)
class Place:
    """A token to read, behind what a prompt's row holds.

    Attributes:
        row: of the prompt.
        token: its id.
        slot: where its keys go.
        position: of the token in the text.
        sees: further slots that it attends to, above the committed ones and its own.
    """

    row: int
    token: int
    slot: int
    position: int
    sees: tuple[int, ...] = ()


class TreeTarget(Target):
    """A target that reads a few tokens of each prompt at a time, each on a path of its own.

    Args:
        directory: the model's.
        aux_layers: the hidden states that a head is fed.
        rows: how many prompts.
        capacity: tokens of each.
    """

    def __init__(
        self, directory: Path, aux_layers: tuple[int, ...], rows: int, capacity: int
    ) -> None:
        # `read` keeps the states itself.
        super().__init__(directory, (), dtype=torch.float32)
        self.aux_layers = aux_layers
        config = self.config
        self.groups = config.num_attention_heads // config.num_key_value_heads
        shape = (rows, config.num_key_value_heads, capacity, config.head_dim)
        self.room = torch.zeros(len(self.layers), 2, *shape)
        self.lengths = [0] * rows
        self.eos = int(config.eos_token_id)

    @torch.inference_mode()
    def read(
        self, places: Sequence[Place], last: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads tokens.

        Args:
            places: what to read, and where.
            last: give the logits of so many places at the end; default: of all.

        Returns:
            The logits behind each, `[places, vocab]`, and its states, `[places, aux, hidden]`.
        """
        rows = sorted({place.row for place in places})
        if 2 * len(rows) > len(self.lengths):
            # Lanes that nobody needs cost less than a copy of the others' keys and values.
            rows = list(range(len(self.lengths)))
        columns: list[int] = []
        counts = dict.fromkeys(rows, 0)
        for place in places:
            columns.append(counts[place.row])
            counts[place.row] += 1
        lanes = [rows.index(place.row) for place in places]
        slots = [place.slot for place in places]
        used = max(max(slots) + 1, *(self.lengths[row] for row in rows))
        mask = torch.zeros(len(rows), max(counts.values()), used, dtype=torch.bool)
        # A lane that is padding sees something, so that its softmax is a number.
        mask[:, :, 0] = True
        for place, lane, column in zip(places, lanes, columns, strict=True):
            mask[lane, column, : self.lengths[place.row]] = True
            mask[lane, column, [*place.sees, place.slot]] = True
        own_rows = torch.tensor([place.row for place in places])
        own_slots, spread = torch.tensor(slots), (torch.tensor(lanes), torch.tensor(columns))
        positions = torch.tensor([[place.position for place in places]])
        hidden = self.embedding[[place.token for place in places]][None]
        cos, sin = self.model.rotary_emb(hidden, positions)
        every = slice(None) if len(rows) == self.room.shape[2] else torch.tensor(rows)
        states = hidden.new_empty(len(places), len(self.aux_layers), hidden.shape[-1])
        for index, layer in enumerate(self.layers):
            if index in self.aux_layers:
                states[:, self.aux_layers.index(index)] = hidden[0]
            normed = layer.input_layernorm(hidden)
            own = layer.self_attn
            query, key, value = (
                projected(normed).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
                for projected in (own.q_proj, own.k_proj, own.v_proj)
            )
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            room = self.room[index]
            room[0][own_rows, :, own_slots] = key[0].transpose(0, 1)
            room[1][own_rows, :, own_slots] = value[0].transpose(0, 1)
            attended = self._attend(query[0], room[:, every, :, :used], mask, spread)
            hidden = hidden + own.o_proj(attended[None])
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        if len(self.layers) in self.aux_layers:
            states[:, self.aux_layers.index(len(self.layers))] = hidden[0]
        ends = hidden[0] if last is None else hidden[0, -last:]
        return functional.linear(self.model.norm(ends), self.lm_head), states

    def _attend(
        self,
        query: torch.Tensor,
        room: torch.Tensor,
        mask: torch.Tensor,
        spread: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Attention of a flat batch, `[heads, places, width]`, as `[places, hidden]`."""
        heads, _, width = query.shape
        lanes, columns = mask.shape[:2]
        padded = query.new_zeros(lanes, columns, heads, width)
        padded[spread] = query.transpose(0, 1)
        # Heads that share keys are further queries of one head.
        grouped = padded.view(lanes, columns, -1, self.groups, width).permute(0, 2, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            *(grouped.flatten(2, 3), room[0], room[1]),
            attn_mask=mask[:, None].repeat(1, 1, self.groups, 1),
        )
        attended = attended.view(lanes, -1, self.groups, columns, width).permute(0, 3, 1, 2, 4)
        return attended.flatten(2)[spread]

    def fill(self, row: int, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads a prompt into an empty row.

        Returns:
            The logits behind its last token, `[vocab]`, and the states of all.
        """
        self.lengths[row] = 0
        places = [
            Place(row, token, slot, slot, tuple(range(slot))) for slot, token in enumerate(tokens)
        ]
        logits, states = self.read(places, last=1)
        self.lengths[row] = len(tokens)
        return logits[-1], states

    def commit(self, row: int, slots: Sequence[int]) -> None:
        """Keeps these of the slots that were read behind what a row holds, in this order."""
        start = self.lengths[row]
        self.lengths[row] = start + len(slots)
        kept = self.room[:, :, row, :, torch.tensor(slots)]
        self.room[:, :, row, :, start : self.lengths[row]] = kept


class TreeHead(Eagle3Head):
    """An EAGLE-3 head that drafts trees.

    Args:
        directory: the head's.
        embedding: the target's, `[vocab, hidden]`.
        rows: how many prompts.
        capacity: tokens of each.
    """

    def __init__(self, directory: Path, embedding: torch.Tensor, rows: int, capacity: int) -> None:
        read = load(directory)
        super().__init__(read.config, read.draft_tokens)
        self.load_state_dict(read.state_dict())
        self.requires_grad_(False)
        self.embedding = embedding
        heads = self.config.num_key_value_heads
        self.room = torch.zeros(2, rows, heads, capacity, self.config.head_dim)
        # Of each prompt: the states that it was told of, call by call, and the last one's input.
        self.states: list[list[torch.Tensor]] = [[] for _ in range(rows)]
        self.last: list[torch.Tensor] = [torch.empty(0)] * rows

    def length(self, row: int) -> int:
        """Tokens of a prompt and its answer that were followed."""
        return sum(map(len, self.states[row]))

    def rewind(self) -> None:
        """Forgets all but the prompts."""
        for row, states in enumerate(self.states):
            del states[1:]
            self.last[row] = self.combine(states[0][None, -1:])[0, -1].detach()

    @torch.inference_mode()
    def follow(self, row: int, states: torch.Tensor, next_tokens: Sequence[int]) -> None:
        """Takes in the states of further tokens of a prompt, and the token that followed each."""
        start = self.length(row)
        end = start + len(next_tokens)
        combined = self.combine(states[None])
        inputs, _ = self._inputs(self.embedding[list(next_tokens)][None], combined)
        own = self.layer.self_attn
        places = torch.arange(start, end)
        self.room[0, row, :, start:end] = self._heads(own.k_proj(inputs), places)[0]
        self.room[1, row, :, start:end] = self._heads(own.v_proj(inputs))[0]
        self.states[row].append(states)
        self.last[row] = combined[0, -1]

    @torch.inference_mode()
    def draft(
        self, rows: Sequence[int], tokens: Sequence[int], width: int, depth: int, nodes: int
    ) -> list[DraftTree]:
        """Drafts a tree for each of some prompts.

        Each level keeps the `width` nodes of the largest cumulated probability, each of them has
        `width` children, and of all nodes the most probable are the tree.

        Args:
            rows: of the prompts.
            tokens: the last token of each, which `follow` was told of.
            width: 1 for a chain.
            depth: levels.
            nodes: of a tree, at most.
        """
        own, layer = self.layer.self_attn, self.layer
        lengths = torch.tensor([self.length(row) for row in rows])
        used = int(lengths.max())
        key, value = self.room[:, torch.tensor(rows), :, :used]
        hidden_mask = (torch.arange(used) >= lengths[:, None])[:, None, None]
        hidden = torch.stack([self.last[row] for row in rows])[:, None]
        token = torch.tensor(tokens)[:, None]
        # Of each beam: its cumulated log probability, and its place among all candidates.
        total = torch.zeros(len(rows), 1)
        place = torch.full((len(rows), 1), -1)
        further: list[tuple[torch.Tensor, torch.Tensor]] = []
        found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        all_logits = []
        for level in range(depth):
            inputs, residual = self._inputs(self.embedding[token], hidden)
            positions = (lengths - 1 + level)[:, None].expand(token.shape)
            query = self._heads(own.q_proj(inputs), positions)
            if level:
                keys = self._heads(own.k_proj(inputs), positions)
                further.append((keys, self._heads(own.v_proj(inputs))))
            attended = self._attend(query, key, value, hidden_mask, further)
            residual = residual + own.o_proj(attended)
            residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
            logits = self.lm_head(self.norm(residual))
            if width == 1:
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
            hidden = residual.take_along_dim(beam[..., None], 1)
            lane = beam[:, None, :, None]
            further = [(k.take_along_dim(lane, 2), v.take_along_dim(lane, 2)) for k, v in further]
        totals, ids, places = (torch.cat([part[i] for part in found], 1) for i in range(3))
        # Stable, so that a child that is as probable as its parent stays behind it.
        order = totals.argsort(stable=True, dim=1, descending=True)[:, :nodes].tolist()
        trees = []
        for row, kept in enumerate(order):
            index = {candidate: node for node, candidate in enumerate(kept)} | {-1: -1}
            above = places[row].tolist()
            trees.append(
                DraftTree(
                    ids[row, kept].tolist(),
                    [index[above[candidate]] for candidate in kept],
                    torch.stack([part[row] for part in all_logits]) if width == 1 else None,
                )
            )
        return trees
