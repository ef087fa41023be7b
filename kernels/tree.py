"""Margin-aware verification of trees in two Triton launches that read each row once.

The rule is the one of `walk`. Symbols: V vocabulary, N nodes, B requests, R = N + B rows, S splits
of a row.

    top2_kernel    grid (R, S)   z1 with its id, and z2, of the rows of the nodes, then of the roots
    walk_kernel    grid (B,)     joins the splits, judges each node on its parent's row, and walks
                                 down one request's tree

In `walk_kernel` a lane is a place of the tree: lane 0 is the root and lane i + 1 node i. What a
path is worth is a sum over its nodes, found for all of them at once by pointer doubling: in each
round a node adds what the node where its known part begins has found, and begins where that does.

Bytes moved: the rows once, one logit of each node again, the partial results of `top2`, those of a
row once for each child, and the outputs. With a price z2 is neither looked for nor stored.
"""

import torch
import triton
import triton.language as tl

from vllm_mars.kernels.greedy import num_positions
from vllm_mars.kernels.terms import (
    FIRST_TIE,
    LONGEST_PRICE,
    MOST_LOSS,
    MOST_NODES,
    RELAXED_TIE,
    TIE_BITS,
    Margin,
    TreeOutput,
    Trees,
    Verdict,
)
from vllm_mars.kernels.top2 import reduce_splits, unpack_id
from vllm_mars.kernels.verdicts import price_of, row_arguments, verdicts_at

_RELAXED = tl.constexpr(int(Verdict.RELAXED))
_FIRST = tl.constexpr(int(Verdict.FIRST))
_MOST_NODES = tl.constexpr(MOST_NODES)
_MOST_LOSS = tl.constexpr(MOST_LOSS)
_LONGEST_PRICE = tl.constexpr(LONGEST_PRICE)
_TIE_UNIT = tl.constexpr(1 << TIE_BITS)
_FIRST_TIE = tl.constexpr(FIRST_TIE)
_RELAXED_TIE = tl.constexpr(RELAXED_TIE)

# Small index arrays, whose alignment would only multiply the compiled variants.
_UNALIGNED = [
    *("output_token_ids_ptr", "path_ptr", "num_accepted_ptr", "num_relaxed_ptr", "lost_ptr"),
    *("draft_token_ids_ptr", "parents_ptr", "draws_ptr", "node_rows_ptr", "root_rows_ptr"),
    *("cu_num_draft_tokens_ptr", "protected_ptr", "theta", "gap", "price"),
]


@triton.jit
def _row_at(node_rows_ptr, root_rows_ptr, start, request, here):
    """The row of logits at a place of the tree, int64."""
    of_root = tl.load(root_rows_ptr + request).to(tl.int64)
    of_node = tl.load(node_rows_ptr + start + here - 1, mask=here > 0, other=0).to(tl.int64)
    return tl.where(here > 0, of_node, of_root)


@triton.jit(
    do_not_specialize=[
        *("theta", "gap", "price", "num_draft", "max_depth", "num_rounds", "num_leaps"),
        "num_splits",
    ],
    do_not_specialize_on_alignment=_UNALIGNED,
)
def walk_kernel(
    # [batch, max_depth + 1]
    output_token_ids_ptr,
    # [batch, max_depth]
    path_ptr,
    # [batch]
    num_accepted_ptr,
    # [batch]
    num_relaxed_ptr,
    # [batch]
    lost_ptr,
    # [num_draft + batch, num_splits]
    best_ptr,
    # [num_draft + batch, num_splits]
    second_ptr,
    # [*, vocab]
    logits_ptr,
    logits_stride,
    # [num_draft]
    draft_token_ids_ptr,
    # [num_draft], index among the request's nodes, or -1
    parents_ptr,
    # [*] or None
    draws_ptr,
    # [vocab] or None
    protected_ptr,
    # [num_draft]
    node_rows_ptr,
    # [batch]
    root_rows_ptr,
    # [batch], inclusive prefix sum
    cu_num_draft_tokens_ptr,
    # float, or [batch]
    theta,
    # float, or [batch]
    gap,
    # in units of 2**-LOSS_BITS nats, or [batch] in nats
    price,
    num_draft,
    max_depth,
    # Rounds of doubling, and leaps, that the deepest tree may need.
    num_rounds,
    num_leaps,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    PREFER: tl.constexpr,
    HAS_DRAWS: tl.constexpr,
    HAS_PROTECTED: tl.constexpr,
    HAS_PRICE: tl.constexpr,
    THETA_PER_REQUEST: tl.constexpr,
    GAP_PER_REQUEST: tl.constexpr,
    PRICE_PER_REQUEST: tl.constexpr,
    WITH_SECOND: tl.constexpr,
):
    request = tl.program_id(0)
    end = tl.load(cu_num_draft_tokens_ptr + request)
    start = tl.load(cu_num_draft_tokens_ptr + request - 1, mask=request > 0, other=0)
    if THETA_PER_REQUEST:
        theta = tl.load(theta + request)
    if GAP_PER_REQUEST:
        gap = tl.load(gap + request)
    if HAS_PRICE:
        price = price_of(price, request, PRICE_PER_REQUEST)
    slot = tl.arange(0, SLOTS)
    position = start + slot - 1
    is_node = (slot > 0) & (slot <= _MOST_NODES) & (position < end)
    parent = tl.load(parents_ptr + position, mask=is_node, other=-2) + 1
    is_node = is_node & (parent >= 0) & (parent < slot)
    # The root, and what is no node, stand for themselves.
    parent = tl.where(is_node, parent, slot)
    below_root = is_node & (parent == 0)
    below_node = is_node & (parent > 0)
    root_row = tl.load(root_rows_ptr + request).to(tl.int64)
    row = tl.load(node_rows_ptr + start + parent - 1, mask=below_node, other=0).to(tl.int64)
    draft, verdict, loss, _, _, argmax = verdicts_at(
        best_ptr,
        second_ptr,
        logits_ptr,
        logits_stride,
        draft_token_ids_ptr,
        protected_ptr,
        None,
        position,
        tl.where(below_root, num_draft + request, start + parent - 1),
        tl.where(below_root, root_row, row),
        is_node,
        is_node,
        theta,
        gap,
        price,
        vocab,
        num_splits,
        SPLITS,
        HAS_PROTECTED,
        False,
        HAS_PRICE,
        WITH_SECOND,
        HAS_DRAWS,
    )
    is_relaxed = verdict == _RELAXED
    is_acceptable = is_relaxed | (verdict == _FIRST)

    # Where a leap to each node begins, and what it is worth.
    begin = tl.where(is_acceptable, parent, slot)
    if PREFER == "draft":
        worth = is_acceptable.to(tl.int64)
    elif PREFER == "target":
        worth = 2 * (_MOST_LOSS - loss) + (draft == argmax).to(tl.int64) + 1
    else:
        if not HAS_PRICE:
            price = tl.full([], _LONGEST_PRICE, tl.int64)
        worth = (price - tl.where(is_relaxed, loss, 0)) * _TIE_UNIT
        worth = worth + tl.where(is_relaxed, _RELAXED_TIE, _FIRST_TIE)
        worth = tl.where(is_acceptable, worth, 0)
        for _ in range(0, num_rounds):
            worth += tl.gather(worth, begin, 0)
            begin = tl.gather(begin, begin, 0)

    here = tl.zeros([], tl.int32)
    for _ in range(0, num_leaps):
        is_leap = is_acceptable & (begin == here) & (worth > 0)
        most = tl.max(tl.where(is_leap, worth, 0), axis=0)
        there = tl.min(tl.where(is_leap & (worth == most), slot, SLOTS), axis=0)
        if HAS_DRAWS:
            drawn = tl.load(draws_ptr + _row_at(node_rows_ptr, root_rows_ptr, start, request, here))
            is_hit = is_node & (parent == here) & (draft == drawn) & (draft >= 0) & (draft < vocab)
            hit = tl.min(tl.where(is_hit, slot, SLOTS), axis=0)
            there = tl.where(most > 0, there, hit)
        here = tl.where(there < SLOTS, there, here)

    # The path, from its end to the root.
    on_path = tl.zeros([SLOTS], tl.int32)
    place = here
    for _ in range(0, max_depth):
        on_path = tl.where((slot == place) & (slot > 0), 1, on_path)
        place = tl.load(parents_ptr + start + place - 1, mask=place > 0, other=-1) + 1
    is_taken = on_path > 0
    num_accepted = tl.sum(on_path, axis=0)
    column = tl.cumsum(on_path, axis=0) - 1
    if HAS_DRAWS:
        token = tl.load(draws_ptr + _row_at(node_rows_ptr, root_rows_ptr, start, request, here))
    else:
        index = tl.where(here > 0, start + here - 1, num_draft + request) + tl.zeros([1], tl.int32)
        packed, _ = reduce_splits(
            best_ptr, second_ptr, index, index >= 0, num_splits, SPLITS, WITH_SECOND
        )
        token = tl.max(unpack_id(packed), axis=0)
    token = tl.where(slot == num_accepted, token.to(tl.int32), -1)
    output_ptr = output_token_ids_ptr + request.to(tl.int64) * (max_depth + 1)
    tl.store(output_ptr + column, draft.to(tl.int32), mask=is_taken)
    tl.store(output_ptr + slot, token, mask=(slot >= num_accepted) & (slot <= max_depth))
    path_ptr += request.to(tl.int64) * max_depth
    tl.store(path_ptr + column, slot - 1, mask=is_taken)
    tl.store(path_ptr + slot, -1, mask=(slot >= num_accepted) & (slot < max_depth))
    is_paid = is_taken & is_relaxed
    tl.store(num_accepted_ptr + request, num_accepted)
    tl.store(num_relaxed_ptr + request, tl.sum(is_paid.to(tl.int32), axis=0))
    tl.store(lost_ptr + request, tl.sum(tl.where(is_paid, loss, 0), axis=0))


def verify_tree(trees: Trees, margin: Margin) -> TreeOutput:
    """The Triton form of `vllm_mars.verify_tree`."""
    drafts = trees.drafts
    num_draft, max_depth = len(drafts.draft_token_ids), drafts.max_draft_len
    batch, device = len(drafts.cu_num_draft_tokens), drafts.logits.device
    output = TreeOutput(
        torch.empty(batch, max_depth + 1, dtype=torch.int32, device=device),
        torch.empty(batch, max_depth, dtype=torch.int32, device=device),
        *(torch.empty(batch, dtype=torch.int32, device=device) for _ in range(2)),
        torch.empty(batch, dtype=torch.int64, device=device),
    )
    if not batch:
        return output
    walk_kernel[(batch,)](
        *output,
        parents_ptr=trees.parents,
        draws_ptr=trees.draws,
        node_rows_ptr=drafts.target_rows,
        root_rows_ptr=drafts.bonus_rows,
        num_draft=num_draft,
        max_depth=max_depth,
        num_rounds=max(max_depth - 1, 0).bit_length(),
        # Without draws "longest" and a price end where their one leap does.
        num_leaps=1 if trees.prefer == "longest" and trees.draws is None else max_depth,
        # One request may hold all nodes.
        SLOTS=num_positions(max(max_depth, min(num_draft, MOST_NODES))),
        PREFER=trees.prefer,
        HAS_DRAWS=trees.draws is not None,
        **row_arguments(drafts, margin),
    )
    return output
