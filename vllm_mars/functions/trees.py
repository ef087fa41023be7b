"""Margin-aware verification of draft trees, which waits for the device.

A node is a draft token behind its parent, and on its parent's row strict, relaxed or neither as
`verify_greedy` says (docs/rule.md). Of the paths from the root over strict and relaxed nodes one is
taken; of equal ones that with the fewest relaxed nodes, then the longest, then what ends first.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vllm_mars.functions.verify import ID_DTYPES, check_tensor, verify_greedy
from vllm_mars.kernels.budget import MAX_LOSS, price_units
from vllm_mars.kernels.rules import PRICE, THETA, Rule
from vllm_mars.options.config import check_value

# Nodes of a request's tree that are looked at.
MOST_NODES = 128
# In the place of a loss: of the argmax, and of a token that is not acceptable.
STRICT, NEVER = -1, -2


class TreeOutput(NamedTuple):
    """What one verification of trees emits.

    Attributes:
        output_token_ids: `[batch, max_depth + 1]` int32; the accepted tokens, the argmax of the row
            behind them, then -1.
        path: `[batch, max_depth]` int32; the accepted nodes by index in their tree, then -1.
        num_accepted: `[batch]` int32, accepted nodes.
        num_relaxed: `[batch]` int32, those of them that only the margin accepted.
        lost: `[batch]` int64, what these lost, in units of 2**-16 nats, each rounded up.
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
    """Verifies greedy draft trees by the margin-aware rule; a chain is as for `verify_greedy`.

    Args:
        logits: `[num_rows, vocab]` float32, bfloat16 or float16, any strides. All other tensors
            are contiguous, and ids and rows are int32 or int64.
        draft_token_ids: `[num_draft]`, each request's nodes, parents first. Ids outside [0, vocab)
            are rejected, and all nodes of a request behind its 128th.
        parents: `[num_draft]` int32, the parent's index among its request's nodes, or -1 for the
            root; a node with any other parent is rejected.
        cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum of the numbers of nodes.
        root_rows: `[batch]`, the row of `logits` behind each request's last token.
        node_rows: `[num_draft]`, the row of `logits` behind each node.
        theta: float in (0, 1] or float32 `[batch]`; 1 is strict. One of theta and price is given.
        price: nats per token gained, float >= 0 or float32 `[batch]`; 0 is strict. The path is
            taken whose `price` times its nodes, less its loss, is largest, whatever `prefer` is.
        protected: bool `[vocab]`; tokens at which the rule stays strict.
        prefer: which acceptable child is taken. "draft": the first. "target": the argmax, else the
            one that loses least. "longest": that of the longest path, which then loses least.
        max_depth: of the deepest tree, or more: the output's width. Default: all nodes, up to 128.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
    """
    if prefer not in ("draft", "target", "longest"):
        raise ValueError(f"prefer={prefer!r} is not one of 'draft', 'target', 'longest'.")
    rule, value = (PRICE, price) if theta is None else (THETA, theta)
    if value is None or (theta is not None and price is not None):
        raise ValueError("theta and price: exactly one names the rule; give that one alone.")
    ends = cu_num_draft_tokens
    nodes, batch, vocab = (len(parents),), (len(ends),), (logits.shape[-1],)
    protected = logits.new_zeros(vocab, dtype=torch.bool) if protected is None else protected
    if not isinstance(value, Tensor):
        check_value(rule, value, rule.name)
        value = logits.new_full(batch, value, dtype=torch.float32)
    for name, tensor, dtypes, shape in (
        ("logits", logits[:0], (torch.float32, torch.bfloat16, torch.float16), (0, *vocab)),
        ("draft_token_ids", draft_token_ids, ID_DTYPES, nodes),
        ("parents", parents, (torch.int32,), nodes),
        ("cu_num_draft_tokens", ends, (torch.int32,), batch),
        ("root_rows", root_rows, ID_DTYPES, batch),
        ("node_rows", node_rows, ID_DTYPES, nodes),
        (rule.name, value, (torch.float32,), batch),
        ("protected", protected, (torch.bool,), vocab),
    ):
        check_tensor(name, tensor, dtypes, logits.device, shape)
    width = min(*nodes, MOST_NODES) if max_depth is None else max_depth
    new, tokens, taken, counts, start = ends.new_tensor, [], [], [], 0
    for request, end in enumerate(ends.tolist()):
        own = slice(start, min(end, start + MOST_NODES))
        above, drafts = parents[own].tolist(), draft_token_ids[own]
        # Of each node, and of the root at index -1.
        rows = [*node_rows[own].tolist(), int(root_rows[request])]
        judged = logits[[rows[it] if it in range(len(above)) else rows[-1] for it in above]]
        losses = _losses(judged, drafts, rule, value[request], protected)
        paths: dict[int, list[int]] = {-1: []}
        for node, parent in enumerate(above):
            if parent in paths and losses[node] != NEVER:
                paths[node] = [*paths[parent], node]
        nats = float(value[request]) if rule is PRICE else None
        path = min(paths.values(), key=lambda it: _key(it, losses, prefer, nats))
        paid = [losses[node] for node in path if losses[node] != STRICT]
        padding, last = [-1] * (width - len(path)), rows[path[-1] if path else -1]
        tokens.append([*drafts[path].tolist(), int(logits[last].argmax()), *padding])
        taken.append([*path, *padding])
        counts.append([len(path), len(paid), sum(paid)])
        start = end
    count = new(counts, dtype=torch.int64).view(*batch, 3).T.contiguous()
    tables = new(tokens).view(*batch, width + 1), new(taken).view(*batch, width)
    return TreeOutput(*tables, count[0].int(), count[1].int(), count[2])


def _losses(
    logits: Tensor, drafts: Tensor, rule: Rule, value: Tensor, protected: Tensor
) -> list[int]:
    """What each node loses in units of 2**-16 nats if it is relaxed; else STRICT or NEVER."""
    ends = torch.arange(1, len(drafts) + 1, dtype=torch.int32, device=logits.device)
    # At the highest price any loss pays; `_key` looks at the request's own.
    given = {"price": PRICE.most} if rule is PRICE else {"theta": value.repeat(len(drafts))}
    # Each node is a draft of its own, whose bonus row nobody looks at.
    found = verify_greedy(
        logits.repeat_interleave(2, dim=0),
        drafts,
        ends,
        protected=protected,
        max_draft_len=1,
        **given,
    )
    kinds = torch.stack([found.num_accepted, found.num_relaxed, found.lost]).T.tolist()
    return [
        (lost if is_relaxed else STRICT) if is_accepted else NEVER
        for is_accepted, is_relaxed, lost in kinds
    ]


def _key(path: list[int], losses: list[int], prefer: str, price: float | None) -> tuple[Any, ...]:
    """What is least for the path that is taken; its end comes behind any node."""
    if price is None and prefer == "draft":
        return *path, MOST_NODES
    if price is None and prefer == "target":
        return *((losses[node], node) for node in path), (MAX_LOSS + 1, 0)
    paid = [losses[node] for node in path if losses[node] != STRICT]
    # "longest" is a price that no path can lose.
    each = 2 * MOST_NODES * MAX_LOSS if price is None else price_units(price)
    return sum(paid) - each * len(path), len(paid), -len(path)
