"""`verify_tree`: argument checks, then the walk."""

import torch

from vllm_mars.config import check_value
from vllm_mars.kernels import tree as terms
from vllm_mars.verify import ID_DTYPES, check_tensor


def verify_tree(
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    parents: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    root_rows: torch.Tensor,
    node_rows: torch.Tensor,
    theta: float | torch.Tensor | None = None,
    *,
    price: float | torch.Tensor | None = None,
    protected: torch.Tensor | None = None,
    prefer: terms.Preference = "longest",
    max_depth: int | None = None,
) -> terms.TreeOutput:
    """Verifies a batch of greedy draft trees by the margin-aware rule.

    A node's token is judged on its parent's row as `verify_greedy` judges a draft token. The
    accepted path goes from the root from child to child, each acceptable; the argmax of the row
    that it ends on follows. A tree with one child per node gives what `verify_greedy` gives.

    Args:
        logits: `[num_rows, vocab]` float32, bfloat16 or float16, any row stride. All other tensors
            are contiguous.
        draft_token_ids: `[num_draft]` int32 or int64, each request's nodes, parents first; ids
            outside [0, vocab) are rejected, and all nodes of a request behind its 128th.
        parents: `[num_draft]` int32, the index of each node's parent among its request's nodes, or
            -1 for a child of the root. A node with any other parent is rejected.
        cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum of the numbers of nodes.
        root_rows: `[batch]` int32 or int64, the row of `logits` behind each request's last token.
        node_rows: `[num_draft]` int32 or int64, the row of `logits` behind each node.
        theta: float in (0, 1] or float32 `[batch]`; 1 is strict. One of theta and price is given.
        price: nats per token gained, float >= 0 or float32 `[batch]`; 0 is strict. The path is
            taken whose `price` times its nodes, less its loss, is largest, whatever `prefer` is.
        protected: bool `[vocab]`; tokens at which the rule stays strict.
        prefer: which acceptable child is taken. "draft": the first. "target": the argmax if it is
            among them, else the one that loses least. "longest": the one that leads to the deepest
            acceptable path, of several to the one that loses least.
        max_depth: of the deepest tree, or more: the output's width. Default: all nodes, up to 128.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; the message names it.

    Source: arXiv 2601.15498. Deviations: docs/rule.md.
    """
    device = logits.device
    if logits.ndim != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits has strides {logits.stride()}, but a row must be adjacent.")
    if prefer not in ("draft", "target", "longest"):
        raise ValueError(f"prefer={prefer!r} is not one of 'draft', 'target', 'longest'.")
    named = [(n, v) for n, v in (("theta", theta), ("price", price)) if v is not None]
    if len(named) != 1:
        given = " and ".join(name for name, _ in named) or "none of them"
        raise ValueError(f"Exactly one of theta and price names the rule; {given} is given.")
    rule, value = named[0]
    nodes, batch, vocab = (len(parents),), (len(cu_num_draft_tokens),), tuple(logits.shape[1:])
    if protected is None:
        protected = torch.zeros(vocab, dtype=torch.bool, device=device)
    if not isinstance(value, torch.Tensor):
        check_value(rule, value, rule)
        value = torch.full(batch, value, dtype=torch.float32, device=device)
    for name, tensor, dtypes, shape in (
        ("logits", logits[:0], (torch.float32, torch.bfloat16, torch.float16), (0, *vocab)),
        ("draft_token_ids", draft_token_ids, ID_DTYPES, nodes),
        ("parents", parents, (torch.int32,), nodes),
        ("cu_num_draft_tokens", cu_num_draft_tokens, (torch.int32,), batch),
        ("root_rows", root_rows, ID_DTYPES, batch),
        ("node_rows", node_rows, ID_DTYPES, nodes),
        (rule, value, (torch.float32,), batch),
        ("protected", protected, (torch.bool,), vocab),
    ):
        check_tensor(name, tensor, dtypes, device, shape)
    price = torch.full_like(value, terms.LONGEST_PRICE, dtype=torch.int64)
    if rule == "price":
        prefer = "longest"
        price = (value * 2**terms.LOSS_BITS).floor().clamp(max=terms.MOST_PRICE).long()
    trees = terms.Trees(
        *(logits, draft_token_ids, cu_num_draft_tokens, node_rows, root_rows, parents),
        *(rule, value, price, protected, prefer),
        min(*nodes, terms.MOST_NODES) if max_depth is None else max_depth,
    )
    return terms.verify_tree(trees)
