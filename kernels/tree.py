"""Margin-aware verification of trees in two Triton launches that read each row once.

The rule is that of `tree_reference`. Symbols: N nodes, B requests, S splits of a row.

    top2_kernel   grid (N + B, S)   z1 with its id, and z2, of the nodes' rows, then the roots'
    walk_kernel   grid (B,)         joins the splits, judges each node on its parent's row, and
                                    walks down one request's tree; lane 0 is its root

What a path is worth is a sum over its nodes, found for all of them at once by pointer doubling: in
each round a node adds what the node where its known part begins has found, and begins where that
does. Bytes moved: the rows once, one logit of each node, a row's partial results for each child.
"""

import torch
import triton
import triton.language as tl

from vllm_mars.kernels import tree_reference as terms
from vllm_mars.kernels.top2 import reduce_rows, reduce_splits, unpack_id, unpack_value

_UNIT = tl.constexpr(2.0**terms.LOSS_BITS)
_MOST_LOSS = tl.constexpr(float(terms.MOST_LOSS))
_MOST_NODES = tl.constexpr(terms.MOST_NODES)
# Of doubling, that the deepest tree needs.
_ROUNDS = tl.constexpr((terms.MOST_NODES - 1).bit_length())
_TIE_UNIT = tl.constexpr(1 << terms.TIE_BITS)
_STRICT_TIE = tl.constexpr(terms.STRICT_TIE)
_RELAXED_TIE = tl.constexpr(terms.RELAXED_TIE)


@triton.jit(do_not_specialize=["num_draft", "max_depth", "num_splits"])
def walk_kernel(
    # [batch, max_depth + 1], [batch, max_depth], and [batch] each
    output_token_ids_ptr,
    path_ptr,
    num_accepted_ptr,
    num_relaxed_ptr,
    lost_ptr,
    # [num_draft + batch, num_splits] each, and [*, vocab]
    best_ptr,
    second_ptr,
    logits_ptr,
    logits_stride,
    # [num_draft] each
    draft_token_ids_ptr,
    parents_ptr,
    node_rows_ptr,
    # [batch] each, and [vocab]
    root_rows_ptr,
    cu_num_draft_tokens_ptr,
    value_ptr,
    price_ptr,
    protected_ptr,
    num_draft,
    max_depth,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    RULE: tl.constexpr,
    PREFER: tl.constexpr,
):
    HAS_Z2: tl.constexpr = RULE != "price"
    request = tl.program_id(0)
    end = tl.load(cu_num_draft_tokens_ptr + request)
    start = tl.load(cu_num_draft_tokens_ptr + request - 1, mask=request > 0, other=0)
    slot = tl.arange(0, SLOTS)
    value = tl.load(value_ptr + request) + tl.zeros([SLOTS], tl.float32)
    position = start + slot - 1
    is_node = (slot > 0) & (slot <= _MOST_NODES) & (position < end)
    parent = tl.load(parents_ptr + position, mask=is_node, other=-2) + 1
    draft = tl.load(draft_token_ids_ptr + position, mask=is_node, other=-1).to(tl.int64)
    is_node = is_node & (parent >= 0) & (parent < slot) & (draft >= 0) & (draft < vocab)

    # int64 before the multiply: a row can start past 2**31 elements.
    behind = is_node & (parent > 0)
    row = tl.load(node_rows_ptr + start + parent - 1, mask=behind, other=0).to(tl.int64)
    row = tl.where(behind, row, tl.load(root_rows_ptr + request).to(tl.int64))
    index = tl.where(behind, start + parent - 1, num_draft + request)
    packed, second = reduce_splits(best_ptr, second_ptr, index, is_node, num_splits, SPLITS, HAS_Z2)
    first, argmax = unpack_value(packed), unpack_id(packed)
    logit = tl.load(logits_ptr + row * logits_stride + draft, mask=is_node, other=0).to(tl.float32)
    is_strict = is_node & (draft == argmax)
    if RULE == "price":
        is_relaxed = (logit > float("-inf")) & (first < float("inf"))
    elif RULE == "gap":
        is_relaxed = (logit >= second) & (second > first - value)
    else:
        is_relaxed = (logit >= second) & (second > value * first) & ((value == 1) | (first > 0))
    is_protected = tl.load(protected_ptr + draft, mask=is_node, other=0) != 0
    is_protected = is_protected | (tl.load(protected_ptr + argmax, mask=is_node, other=0) != 0)
    is_relaxed = is_relaxed & is_node & ~is_strict & ~is_protected
    is_acceptable = is_strict | is_relaxed
    loss = tl.ceil(tl.minimum((first - logit) * _UNIT, _MOST_LOSS))
    loss = tl.where(is_relaxed, loss, 0.0).to(tl.int64)

    # Where a leap to each node begins, at the node itself if there is none, and what it is worth.
    begin = tl.where(is_acceptable, parent, slot)
    tie = tl.where(is_relaxed, _RELAXED_TIE, _STRICT_TIE)
    worth = (tl.load(price_ptr + request) - loss) * _TIE_UNIT + tie
    worth = tl.where(is_acceptable, 1 if PREFER == "draft" else worth, 0)
    if PREFER == "longest":
        for _ in range(0, _ROUNDS):
            worth += tl.gather(worth, begin, 0)
            begin = tl.gather(begin, begin, 0)
    here = tl.zeros([], tl.int32)
    for _ in range(0, 1 if PREFER == "longest" else max_depth):
        is_leap = is_acceptable & (begin == here) & (worth > 0)
        most = tl.max(tl.where(is_leap, worth, 0), axis=0)
        there = tl.min(tl.where(is_leap & (worth == most), slot, SLOTS), axis=0)
        here = tl.where(there < SLOTS, there, here)

    # The path, from its end to the root.
    on_path = tl.zeros([SLOTS], tl.int32)
    place = here
    for _ in range(0, max_depth):
        on_path = tl.where((slot == place) & (slot > 0), 1, on_path)
        place = tl.load(parents_ptr + start + place - 1, mask=place > 0, other=-1) + 1
    is_taken, column = on_path > 0, tl.cumsum(on_path, axis=0) - 1
    num_accepted = tl.sum(on_path, axis=0)
    last = tl.where(here > 0, start + here - 1, num_draft + request) + tl.zeros([1], tl.int32)
    packed, _ = reduce_splits(best_ptr, second_ptr, last, last >= 0, num_splits, SPLITS, False)
    token = tl.where(slot == num_accepted, tl.max(unpack_id(packed), axis=0), -1)
    output_token_ids_ptr += request.to(tl.int64) * (max_depth + 1)
    tl.store(output_token_ids_ptr + column, draft.to(tl.int32), mask=is_taken)
    is_behind = slot >= num_accepted
    tl.store(output_token_ids_ptr + slot, token, mask=is_behind & (slot <= max_depth))
    path_ptr += request.to(tl.int64) * max_depth
    tl.store(path_ptr + column, slot - 1, mask=is_taken)
    tl.store(path_ptr + slot, -1, mask=is_behind & (slot < max_depth))
    tl.store(num_accepted_ptr + request, num_accepted)
    tl.store(num_relaxed_ptr + request, tl.sum((is_taken & is_relaxed).to(tl.int32), axis=0))
    tl.store(lost_ptr + request, tl.sum(tl.where(is_taken, loss, 0), axis=0))


def verify_tree(trees: terms.Trees) -> terms.TreeOutput:
    """The Triton form of `vllm_mars.verify_tree`."""
    num_draft, max_depth, logits = len(trees.draft_token_ids), trees.max_depth, trees.logits
    batch, new = len(trees.cu_num_draft_tokens), trees.cu_num_draft_tokens.new_empty
    output = terms.TreeOutput(
        *(new(batch, max_depth + 1), new(batch, max_depth), new(batch), new(batch)),
        new(batch, dtype=torch.int64),
    )
    if not batch:
        return output
    best, second, _, num_splits, padded_splits = reduce_rows(trees, trees.rule != "price")
    # One request may hold all nodes.
    slots = max(max_depth, min(num_draft, terms.MOST_NODES)) + 1
    walk_kernel[(batch,)](
        *(*output, best, second, logits, logits.stride(0)),
        *(trees.draft_token_ids, trees.parents, trees.target_rows, trees.bonus_rows),
        *(trees.cu_num_draft_tokens, trees.value, trees.price, trees.protected),
        *(num_draft, max_depth, logits.shape[1], num_splits, padded_splits),
        SLOTS=max(8, triton.next_power_of_2(slots)),
        RULE=trees.rule,
        PREFER=trees.prefer,
    )
    return output
