"""What the rule reads of the rows, in plain torch: the definition that each backend is checked by.

It runs on any device and reads the rows about five times. Of equal maxima the lowest id is the
argmax; a row that holds a NaN is never relaxed, since torch's topk carries the NaN into z1. The
comparison with the threshold is in float32: `theta * z1`, rounded.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_mars.kernels import cpu
from vllm_mars.kernels.rule import Rows
from vllm_mars.kernels.terms import (
    LOSS_BITS,
    MOST_LOSS,
    Account,
    Drafts,
    Requests,
    Rule,
    VerifyOutput,
)


def read_rows(
    drafts: Drafts,
    thresholds: np.ndarray,
    ends: np.ndarray,
    rule: Rule,
    blocked: Sequence[int] | None,
    is_sampled: np.ndarray | None = None,
    is_drawn: bool = False,
) -> tuple[Rows, np.ndarray]:
    """As `cpu.read_rows`."""
    ids, logits = drafts.draft_token_ids.long(), drafts.logits
    rows = logits[: len(ids)] if drafts.target_rows is None else logits[drafts.target_rows.long()]
    row_argmax = logits.argmax(dim=-1)
    argmax = rows.argmax(dim=-1)
    in_vocab = (ids >= 0) & (ids < rows.shape[1])
    safe = torch.where(in_vocab, ids, 0)
    logit = rows.gather(1, safe[:, None]).squeeze(1).float()
    # Values do not depend on how topk orders ties.
    top = rows.float().topk(min(2, rows.shape[1]), dim=-1).values
    first, second = top[:, 0], top[:, -1]
    loss = first - logit
    units = (loss * 2**LOSS_BITS).clamp(max=MOST_LOSS).ceil()
    units = torch.where(in_vocab & ~loss.isnan(), units, 0).long()
    is_small = torch.zeros_like(in_vocab)
    if rule.name != "price" and rows.shape[1] > 1:
        threshold = torch.from_numpy(thresholds).to(first)
        is_small = in_vocab & (logit >= second) & (second > threshold * first)
        is_small &= (threshold == 1) | (first > 0)
    log_p = entropy = None
    if is_sampled is not None and not is_drawn:
        own = torch.as_tensor(is_sampled, device=ids.device) & in_vocab
        exact = (logit.double() - rows.double().logsumexp(1)).clamp(max=0)
        log_p = torch.where(own, exact, -torch.inf).tolist()
        entropy = torch.special.entr(rows.double().softmax(1)).sum(1).tolist()
    draft, first_choice = safe.cpu().numpy(), argmax.cpu().numpy()
    values, largest = rows.float().cpu().numpy(), first.cpu().numpy()
    is_near_end = cpu.may_end(values, np.arange(len(ids)), largest, ends, is_sampled)
    return (
        Rows(
            torch.where(in_vocab, ids, -1).tolist(),
            argmax.tolist(),
            units.tolist(),
            is_small.tolist(),
            (in_vocab & (logit > -torch.inf) & (first < torch.inf)).tolist(),
            (in_vocab.cpu().numpy() & cpu.is_among(draft, ends)).tolist(),
            cpu.forbidden(draft, first_choice, ends, is_near_end, rule, blocked),
            log_p,
            entropy,
        ),
        row_argmax.cpu().numpy(),
    )


def accept(
    drafts: Drafts,
    requests: Requests,
    rule: Rule,
    blocked: Sequence[int] | None = None,
    account: Account | None = None,
) -> VerifyOutput:
    """As `cpu.accept`."""
    return cpu.accept(drafts, requests, rule, blocked, account, read_rows)
