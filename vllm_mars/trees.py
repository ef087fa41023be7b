"""`verify_tree`: argument checks, then a backend."""

import torch

from vllm_mars.kernels.terms import Drafts, Margin, Preference, TreeOutput, Trees
from vllm_mars.verify import (
    ID_DTYPES,
    Backend,
    check_step,
    check_tensor,
    kernels_of,
    price_or_none,
    resolve_backend,
)


def verify_tree(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    parents: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    root_rows: torch.Tensor,
    node_rows: torch.Tensor,
    theta: float | torch.Tensor = 1.0,
    *,
    gap: float | torch.Tensor = 0.0,
    price: float | torch.Tensor = 0.0,
    protected: torch.Tensor | None = None,
    prefer: Preference = "longest",
    max_depth: int | None = None,
    draws: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> TreeOutput:
    """Verifies a batch of draft trees by the margin-aware rule.

    A node's token is judged on its parent's row as `verify_greedy` judges a draft token on its own.
    The accepted path begins at the root and goes from child to child, each acceptable; the token of
    the row that it ends on follows. A tree with one child per node is a draft of `verify_greedy`,
    and gives the same.

    Args:
        logits: `[num_rows, vocab]` float32, bfloat16 or float16, any row stride. All other tensors
            are contiguous.
        draft_token_ids: `[num_draft]` int32 or int64, each request's nodes, parents first. Of one
            request at most 128 nodes are looked at. An id outside [0, vocab), such as the padding
            -1, is always rejected.
        parents: `[num_draft]` int32, the index of each node's parent among its request's nodes, or
            -1 for a child of the root. A node whose parent is neither -1 nor a node before it is
            always rejected.
        cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum of the requests' numbers of
            nodes; a request may have none.
        root_rows: `[batch]` int32 or int64, the row of `logits` behind each request's last token.
        node_rows: `[num_draft]` int32 or int64, the row of `logits` behind each node.
        theta: float in (0, 1] or float32 `[batch]`. 1 with gap 0 is strict.
        gap: float >= 0 in nats or float32 `[batch]`; with theta 1 this is the metric "gap".
        price: nats per token gained, float >= 0 or float32 `[batch]`, with theta 1 and gap 0. Of
            all paths the one is taken whose `price` times its nodes, less what they lose, is
            largest; 0 is strict. `prefer` is then without effect.
        protected: bool `[vocab]`; tokens at which the rule stays strict.
        prefer: which acceptable child is taken. "draft": the first. "target": the argmax if it is
            among them, else the one that loses least. "longest": the one that leads to the deepest
            acceptable path, of several to the one that loses least.
        max_depth: depth of the deepest tree, which sets the output's width. Default: read from
            `parents`, which waits for the device; give it in a serving loop.
        draws: None where requests are greedy. To sample, `[num_rows]` int32 or int64: one token
            drawn from the distribution of each row of `logits`, which are then the processed ones
            (temperature, top-k, top-p). At a node the children that the margin accepts are taken
            outright, the argmax counting as in `judge_drafts`; if there is none, the row's draw
            decides: the walk goes on at the child that equals it, or ends with it. So with theta 1
            each emitted token is the draw of its row, whatever the drafts are, and the output's
            distribution is the target's, if the tree does not depend on the draws and each was
            drawn independently.
        backend: "torch", "triton", or "auto": Triton on an accelerator, torch on a CPU.

    Returns:
        A `TreeOutput`; `output_token_ids` is -1 behind the last emitted token, and `path` behind
        the last accepted node.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.
        NotImplementedError: the backend is "triton" on a CPU.

    Source: arXiv 2601.15498. Deviations: docs/rule.md.
    """
    resolved = resolve_backend(backend, logits.device.type)
    device, nodes = logits.device, tuple(draft_token_ids.shape)
    for name, tensor, dtypes, shape in (
        ("parents", parents, (torch.int32,), nodes),
        ("root_rows", root_rows, ID_DTYPES, tuple(cu_num_draft_tokens.shape)),
        ("node_rows", node_rows, ID_DTYPES, nodes),
        ("draws", draws, ID_DTYPES, tuple(logits.shape[:1])),
    ):
        if tensor is not None:
            check_tensor(name, tensor, dtypes, device, shape)
    if prefer not in ("draft", "target", "longest"):
        raise ValueError(
            f"prefer={prefer!r} is not one of 'draft', 'target', 'longest'; "
            "'longest' takes the deepest acceptable path."
        )
    if max_depth is not None and max_depth < 0:
        raise ValueError(f"max_depth={max_depth} is below 0; give the depth of the deepest tree.")
    rows = {"target_rows": node_rows, "bonus_rows": root_rows}
    drafts = Drafts(logits, draft_token_ids, cu_num_draft_tokens, **rows)
    margin = Margin(theta, gap, protected, price=price_or_none(price))
    check_step(drafts, margin)
    if max_depth is None:
        max_depth = _depth(parents.tolist(), cu_num_draft_tokens.tolist())
    trees = Trees(
        drafts._replace(max_draft_len=max_depth),
        parents,
        prefer if margin.price is None else "longest",
        draws,
    )
    if resolved == "triton":
        from vllm_mars.kernels import tree

        return tree.verify_tree(trees, margin)
    return kernels_of(resolved, device.type).verify_tree(trees, margin)


def _depth(parents: list[int], ends: list[int]) -> int:
    """The depth of the deepest tree."""
    deepest = start = 0
    for end in ends:
        depths: list[int] = []
        for parent in parents[start:end]:
            depths.append(1 + (depths[parent] if 0 <= parent < len(depths) else 0))
        deepest = max([deepest, *depths])
        start = end
    return deepest
