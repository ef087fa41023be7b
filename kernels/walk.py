"""The walk down a tree of drafts whose nodes are judged: the definition, and its form on a CPU.

A node is acceptable where its token is the first choice of its parent's row, or relaxed there. From
where it stands, at first the root, a walk leaps to the node that is worth most among those to which
acceptable nodes alone lead, of equals to the one of the lowest index:

    "draft"     a leap is one node, and all are worth the same: the drafter's order decides
    "target"    a leap is one node; the first choice is worth most, then what loses least
    "longest"   the path with the most nodes is worth most, of those the one that loses least
    a price     worth is price * nodes - losses, and a path is taken only if that is above 0

The last two are one rule, since "longest" is a price that no path loses. Of paths of equal worth
the one with the fewest relaxed nodes is best, then the longest. So where each node has one child
this is the rule of `reference.verify_greedy`.

Where no leap is worth anything, the walk ends, and what the row emits follows: the first choice. In
sampling that is a token drawn from the row, and the walk ends only if no child equals it; else it
goes on from there. Acceptable is then only what is relaxed, each node judged alone. Paths are
compared by that, and never by the draws further down: a draw that decides whether its own row is
visited would no longer be one of that row.
"""

from typing import NamedTuple

import torch

from vllm_mars.kernels.terms import (
    FIRST_TIE,
    LONGEST_PRICE,
    MOST_LOSS,
    RELAXED_TIE,
    TIE_BITS,
    Preference,
    TreeOutput,
    Trees,
    Verdict,
    price_units,
)


def walk(
    trees: Trees,
    is_node: torch.Tensor,
    price: float | torch.Tensor | None,
    verdicts: torch.Tensor,
    losses: torch.Tensor,
    is_argmax: torch.Tensor,
    emitted: torch.Tensor,
) -> TreeOutput:
    """Walks down each tree.

    Args:
        trees: the trees.
        is_node: `[num_draft]` bool, as `Trees.parent_rows` gives it.
        price: a price, one for each request, or None.
        verdicts: `[num_draft]` int8, of each node on its parent's row; with draws, judged alone.
        losses: `[num_draft]` int32, what it loses there, in units of 2**-LOSS_BITS nats.
        is_argmax: `[num_draft]` bool, whether it is the first choice there.
        emitted: `[num_rows]`, the first choice of each row, or the draw.
    """
    drafts, width = trees.drafts, trees.drafts.max_draft_len
    ids, vocab = drafts.draft_token_ids.tolist(), drafts.logits.shape[1]
    # No node stands at -2.
    parents = torch.where(is_node, trees.parents, -2).tolist()
    judged = (parents, verdicts.tolist(), losses.tolist(), is_argmax.tolist())
    all_nodes = [_Node(*node) for node in zip(*judged, strict=True)]
    at_node, at_root = (emitted[rows].tolist() for rows in (drafts.target_rows, drafts.bonus_rows))
    batch = len(drafts.cu_num_draft_tokens)
    units = LONGEST_PRICE if price is None else price_units(price)
    prices = [units] * batch if isinstance(units, int) else units.tolist()
    tokens, paths, counts = [], [], []
    start = 0
    for request, end in enumerate(drafts.cu_num_draft_tokens.tolist()):
        nodes, drafted = all_nodes[start:end], ids[start:end]
        begins, worth = _leaps(nodes, trees.prefer, prices[request])
        path: list[int] = []
        while True:
            here, token = -1, at_root[request]
            if path:
                here, token = path[-1], at_node[start + path[-1]]
            leaps = [i for i, begin in enumerate(begins) if begin == here and worth[i] > 0]
            if not leaps and trees.draws is not None and 0 <= token < vocab:
                hits = (i for i, node in enumerate(nodes) if node.parent == here)
                leaps = [i for i in hits if drafted[i] == token][:1]
            if not leaps:
                break
            passed, there = [], max(leaps, key=worth.__getitem__)
            while there != here:
                passed.append(there)
                there = nodes[there].parent
            path += reversed(passed)
        relaxed = [nodes[i] for i in path if nodes[i].verdict == Verdict.RELAXED]
        counts.append((len(path), len(relaxed), sum(node.loss for node in relaxed)))
        emits = [drafted[i] for i in path] + [token]
        tokens.append((emits + [-1] * width)[: width + 1])
        paths.append((path + [-1] * width)[:width])
        start = end

    def as_tensor(rows: list, columns: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(rows, dtype=dtype, device=emitted.device).reshape(len(rows), columns)

    num_accepted, num_relaxed, lost = as_tensor(counts, 3, torch.int64).unbind(1)
    return TreeOutput(
        as_tensor(tokens, width + 1),
        as_tensor(paths, width),
        num_accepted.int(),
        num_relaxed.int(),
        lost.contiguous(),
    )


class _Node(NamedTuple):
    """What is known of a node."""

    parent: int
    verdict: int
    loss: int
    is_argmax: bool


def _leaps(
    nodes: list[_Node], prefer: Preference, price: int
) -> tuple[list[int | None], list[int]]:
    """The node at which a leap to each node begins, and what it is worth.

    None, and 0, where a node is not acceptable; -1 is the root.
    """
    begins: list[int | None] = []
    worth: list[int] = []
    for node in nodes:
        begin, value = node.parent, 0
        if node.parent == -2 or node.verdict not in (Verdict.FIRST, Verdict.RELAXED):
            begin = None
        elif prefer == "draft":
            value = 1
        elif prefer == "target":
            value = 2 * (MOST_LOSS - node.loss) + node.is_argmax + 1
        else:
            is_relaxed = node.verdict == Verdict.RELAXED
            value = (price - is_relaxed * node.loss) << TIE_BITS
            value += RELAXED_TIE if is_relaxed else FIRST_TIE
            if begin >= 0 and begins[begin] is not None:
                value += worth[begin]
                begin = begins[begin]
        begins.append(begin)
        worth.append(value)
    return begins, worth
