"""Margin-aware verification of draft trees, in plain torch on any device; it waits for the device.

A node is a draft token x behind its parent and is judged on its parent's row of target logits z,
with z1 >= z2 the two largest:

    strict    x = argmax z, of equal maxima the lowest id
    relaxed   theta:  z[x] >= z2  and  z2 > theta * z1  and  (theta = 1 or z1 > 0)
              price:  z[x] > -inf  and  z1 < inf
              and neither x nor argmax z is protected

A path from the root is acceptable if each of its nodes is strict or relaxed; a relaxed node loses
z1 - z[x] nats. One acceptable path is taken, and the argmax of the row at its end follows:

    "draft"     from the root on the first acceptable child, in the drafter's order
    "target"    from the root on the child that loses least, of equals a strict one
    "longest"   the path with the most nodes, of these the one that loses least
    a price     the path with the largest price * nodes - losses, if that is above 0

The last two are one rule: "longest" is a price that no path can lose. Of equal paths the one with
the fewest relaxed nodes is taken, then the longest, then the one that ends at the lowest index.
Comparisons are in float32, worths are integers, and a row that holds a NaN relaxes nothing.
"""

from typing import Literal, NamedTuple

import torch

Preference = Literal["draft", "target", "longest"]

# Of a request's tree no more nodes are looked at.
MOST_NODES = 128
# Losses and prices are in units of 2**-LOSS_BITS nats: losses rounded up, prices down.
LOSS_BITS, MOST_LOSS, MOST_PRICE = 16, 1 << 30, 1 << 29
# So many nodes never lose this.
LONGEST_PRICE = 2 * MOST_NODES * MOST_LOSS
# Worths have so many more bits than losses, for what decides between equal ones.
TIE_BITS, STRICT_TIE, RELAXED_TIE = 16, 1, -2 * MOST_NODES
# In the place of a loss.
STRICT = -1


class Trees(NamedTuple):
    """Checked arguments of `vllm_mars.verify_tree`."""

    logits: torch.Tensor
    draft_token_ids: torch.Tensor
    cu_num_draft_tokens: torch.Tensor
    target_rows: torch.Tensor
    bonus_rows: torch.Tensor
    parents: torch.Tensor
    # "theta" or "price", and its value: float32 `[batch]`.
    rule: str
    value: torch.Tensor
    # int64 `[batch]`, in units; `LONGEST_PRICE` where it is not the rule.
    price: torch.Tensor
    protected: torch.Tensor
    prefer: Preference
    max_depth: int


class TreeOutput(NamedTuple):
    """What one verification of trees emits.

    Attributes:
        output_token_ids: `[batch, max_depth + 1]` int32; the accepted tokens, the argmax of the row
            behind them, then -1.
        path: `[batch, max_depth]` int32; the accepted nodes by index in their tree, then -1.
        num_accepted: `[batch]` int32, accepted nodes.
        num_relaxed: `[batch]` int32, those of them that only the margin accepted.
        lost: `[batch]` int64, what these lost against the first choice, in units of 2**-16 nats.
    """

    output_token_ids: torch.Tensor
    path: torch.Tensor
    num_accepted: torch.Tensor
    num_relaxed: torch.Tensor
    lost: torch.Tensor


def verify_tree(trees: Trees) -> TreeOutput:
    """`vllm_mars.verify_tree` of checked arguments."""
    tokens, paths, counts, start = [], [], [], 0
    for request, end in enumerate(trees.cu_num_draft_tokens.tolist()):
        ids = trees.draft_token_ids[start:end].tolist()
        parents = trees.parents[start:end].tolist()
        # Of each node, and of the root at index -1.
        rows = [*trees.target_rows[start:end].tolist(), int(trees.bonus_rows[request])]
        losses = {}
        for node, parent in enumerate(parents[:MOST_NODES]):
            if -1 <= parent < node:
                losses[node] = _judge(trees, rows[parent], ids[node], trees.value[request])
        path = _best_path(parents, losses, int(trees.price[request]), trees.prefer)
        last = int(trees.logits[rows[path[-1] if path else -1]].argmax())
        paid = [losses[node] for node in path if losses[node] != STRICT]
        padding = [-1] * (trees.max_depth - len(path))
        tokens.append([*(ids[node] for node in path), last, *padding])
        paths.append([*path, *padding])
        counts.append([len(path), len(paid), sum(paid)])
        start = end
    new, batch = trees.cu_num_draft_tokens.new_tensor, len(counts)
    count = new(counts, dtype=torch.int64).view(batch, 3).T.contiguous()
    rows = new(tokens).view(batch, trees.max_depth + 1), new(paths).view(batch, trees.max_depth)
    return TreeOutput(*rows, count[0].int(), count[1].int(), count[2])


def _judge(trees: Trees, row: int, draft: int, value: torch.Tensor) -> int | None:
    """What a node loses if it is relaxed, STRICT, or None where it is not acceptable."""
    logits = trees.logits[row].float()
    if not 0 <= draft < len(logits):
        return None
    argmax = int(logits.argmax())
    if draft == argmax:
        return STRICT
    # topk says nothing of the order of equal values, so it gives values and no ids.
    first, second, logit = logits[argmax], logits.topk(2).values[1], logits[draft]
    if trees.rule == "price":
        is_relaxed = logit > -torch.inf and first < torch.inf
    else:
        is_relaxed = logit >= second > value * first and (value == 1 or first > 0)
    if not is_relaxed or trees.protected[draft] or trees.protected[argmax]:
        return None
    return int(((first - logit) * 2**LOSS_BITS).ceil().clamp(max=MOST_LOSS))


def _best_path(
    parents: list[int], losses: dict[int, int | None], price: int, prefer: Preference
) -> list[int]:
    """The path that is taken."""
    worth, paths = {}, {-1: []}
    for node, loss in losses.items():
        if loss is not None and parents[node] in paths:
            worth[node] = (price << TIE_BITS) + STRICT_TIE
            if loss != STRICT:
                worth[node] = (price - loss << TIE_BITS) + RELAXED_TIE
            paths[node] = [*paths[parents[node]], node]
    # Node by node, and at last an end that comes behind any node.
    if prefer == "draft":
        return min(paths.values(), key=lambda path: [*path, MOST_NODES])
    if prefer == "target":
        return min(paths.values(), key=lambda path: [*((-worth[i], i) for i in path), (1, 0)])
    return max(paths.values(), key=lambda path: sum(worth[i] for i in path))
