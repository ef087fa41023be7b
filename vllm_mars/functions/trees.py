"""Margin-aware verification of draft trees, in Python; it waits for the device."""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vllm_mars.functions.verify import (
    ID_DTYPES,
    LOGIT_DTYPES,
    check_tensor,
    rule_values,
    verify_greedy,
)
from vllm_mars.kernels.budget import MAX_LOSS, price_units
from vllm_mars.kernels.rules import PRICE, THETA, Rule

# Nodes of a request's tree that are verified.
MAX_NODES = 128
# Instead of a loss: for the argmax, and for a rejected token.
STRICT = -1
REJECTED = -2


class TreeOutput(NamedTuple):
    """Output of a verification of trees.

    Attributes:
        output_token_ids: `[batch, max_depth + 1]` int32: the accepted tokens, the argmax of the
            row after them, then -1.
        path: `[batch, max_depth]` int32: the accepted nodes by index in their tree, then -1.
        num_accepted: `[batch]` int32: accepted nodes.
        num_relaxed: `[batch]` int32: accepted nodes that only the rule accepted.
        lost: `[batch]` int64: loss of these nodes, in units of 2**-16 nats, each rounded up.
    """

    output_token_ids: Tensor
    path: Tensor
    num_accepted: Tensor
    num_relaxed: Tensor
    lost: Tensor


def verify_tree(
    logits: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor,
    cu_num_draft_tokens: Tensor,
    root_rows: Tensor,
    node_rows: Tensor,
    theta: float | Tensor | None = None,
    *,
    price: float | Tensor | None = None,
    protected: Tensor | None = None,
    prefer: Literal["draft", "target", "longest"] = "longest",
    max_depth: int | None = None,
) -> TreeOutput:
    """Verifies greedy draft trees by the margin-aware rule.

    Each node is verified on its parent's row, as in `verify_greedy`, and one path of accepted nodes
    is emitted. Of equal paths the one with the fewest relaxed nodes wins, then the longest, then
    the one that ends at the first node.

    Args:
        logits: `[num_rows, vocab]` float32, bfloat16 or float16, any strides. All other tensors
            must be contiguous; ids and rows are int32 or int64.
        draft_token_ids: `[num_draft]`, each request's nodes, parents first. Ids outside [0, vocab)
            are rejected, and so are nodes after a request's 128th.
        parents: `[num_draft]` int32, the parent's index among its request's nodes, or -1 for the
            root; a node with any other parent is rejected.
        cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum of the numbers of nodes.
        root_rows: `[batch]`, the row of `logits` for the token after each request's last one.
        node_rows: `[num_draft]`, the row of `logits` for the token after each node.
        theta: float in (0, 1] or float32 `[batch]`; 1 is strict. Give either theta or price.
        price: nats per token gained, float >= 0 or float32 `[batch]`; 0 is strict. The path with
            the largest price * length - loss is taken, and `prefer` is ignored.
        protected: bool `[vocab]`; the rule is strict at these tokens.
        prefer: which accepted child is taken. "draft": the first. "target": the argmax, else the
            one with the smallest loss. "longest": the one on the longest path, then on the path
            with the smallest loss.
        max_depth: upper bound on tree depth, which sets the output's width. Default: all nodes, up
            to 128.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
    """
    if prefer not in ("draft", "target", "longest"):
        raise ValueError(f"prefer={prefer!r} is not one of 'draft', 'target', 'longest'.")
    ends = cu_num_draft_tokens
    batch = len(ends)
    rule, values = rule_values(batch, logits.device, theta=theta, price=price)
    num_draft = len(parents)
    vocab = logits.shape[-1]
    if protected is None:
        protected = logits.new_zeros(vocab, dtype=torch.bool)
    for name, tensor, dtypes, shape in (
        ("logits", logits[:0], LOGIT_DTYPES, (0, vocab)),
        ("draft_token_ids", draft_token_ids, ID_DTYPES, (num_draft,)),
        ("parents", parents, (torch.int32,), (num_draft,)),
        ("cu_num_draft_tokens", ends, (torch.int32,), (batch,)),
        ("root_rows", root_rows, ID_DTYPES, (batch,)),
        ("node_rows", node_rows, ID_DTYPES, (num_draft,)),
        ("protected", protected, (torch.bool,), (vocab,)),
    ):
        check_tensor(name, tensor, dtypes, logits.device, shape)
    width = min(num_draft, MAX_NODES) if max_depth is None else max_depth
    tokens: list[list[int]] = []
    chosen: list[list[int]] = []
    counts: list[list[int]] = []
    start = 0
    for req_idx, end in enumerate(ends.tolist()):
        nodes = slice(start, min(end, start + MAX_NODES))
        drafts = draft_token_ids[nodes]
        node_parents = parents[nodes].tolist()
        # Row after each node, and at index -1 after the root.
        rows = [*node_rows[nodes].tolist(), int(root_rows[req_idx])]
        # Nodes with an invalid parent are verified on the root's row and then ignored.
        parent_rows = [
            rows[parent] if parent in range(len(node_parents)) else rows[-1]
            for parent in node_parents
        ]
        losses = _losses(logits[parent_rows], drafts, rule, values[req_idx], protected)
        paths: dict[int, list[int]] = {-1: []}
        for node, parent in enumerate(node_parents):
            if parent in paths and losses[node] != REJECTED:
                paths[node] = [*paths[parent], node]
        nats = float(values[req_idx]) if rule is PRICE else None
        path = min(paths.values(), key=partial(_key, losses=losses, prefer=prefer, price=nats))
        paid = [losses[node] for node in path if losses[node] != STRICT]
        last_row = rows[path[-1] if path else -1]
        padding = [-1] * (width - len(path))
        tokens.append([*drafts[path].tolist(), int(logits[last_row].argmax()), *padding])
        chosen.append([*path, *padding])
        counts.append([len(path), len(paid), sum(paid)])
        start = end
    count = ends.new_tensor(counts, dtype=torch.int64).view(batch, 3).T.contiguous()
    return TreeOutput(
        output_token_ids=ends.new_tensor(tokens).view(batch, width + 1),
        path=ends.new_tensor(chosen).view(batch, width),
        num_accepted=count[0].int(),
        num_relaxed=count[1].int(),
        lost=count[2],
    )


def _losses(
    logits: Tensor, drafts: Tensor, rule: Rule, value: Tensor, protected: Tensor
) -> list[int]:
    """Returns for each node its loss if relaxed, in 2**-16 nats, else STRICT or REJECTED."""
    # Each node is verified as a draft of one token; its bonus row is not used.
    output = verify_greedy(
        logits.repeat_interleave(2, dim=0),
        drafts,
        torch.arange(1, len(drafts) + 1, dtype=torch.int32, device=logits.device),
        theta=value.repeat(len(drafts)) if rule is THETA else None,
        # At the highest price any loss pays; `_key` applies the request's price.
        price=PRICE.most if rule is PRICE else None,
        protected=protected,
        max_draft_len=1,
    )
    nodes = torch.stack([output.num_accepted, output.num_relaxed, output.lost]).T.tolist()
    return [
        (lost if is_relaxed else STRICT) if is_accepted else REJECTED
        for is_accepted, is_relaxed, lost in nodes
    ]


def _key(path: list[int], losses: list[int], prefer: str, price: float | None) -> tuple[Any, ...]:
    """Sort key of a path, smallest for the best one; the end of a path sorts after any node."""
    if price is None and prefer == "draft":
        return *path, MAX_NODES
    if price is None and prefer == "target":
        return *((losses[node], node) for node in path), (MAX_LOSS + 1, 0)
    paid = [losses[node] for node in path if losses[node] != STRICT]
    # "longest" is a price above the loss of any path.
    units = 2 * MAX_NODES * MAX_LOSS if price is None else price_units(price)
    return sum(paid) - units * len(path), len(paid), -len(path)
