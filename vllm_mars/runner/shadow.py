"""Shadow mode: what other values of the rule would have accepted of a step's drafts.

It waits for the device in each step, on an accelerator.
"""

import math

import numpy as np
import torch

from vllm_mars.kernels import reference
from vllm_mars.kernels.rule import Allowance, greedy, log_partition, sampled
from vllm_mars.kernels.terms import NO_BOUND, Drafts, Rule, Verdict, price_units
from vllm_mars.runner.counters import UNIT, Counters


def count_shadow(
    counters: Counters,
    drafts: Drafts,
    rule: Rule,
    blocked: list[int] | None,
    is_greedy: list[bool],
) -> None:
    """Adds what each value would have accepted of this step, as expected before any draw.

    Args:
        counters: what is added to.
        drafts: the step's; its logits as verification reads them. Not in V2's layout.
        rule: of the engine.
        blocked: a `Verdict` at each position that must stay strict, else 0; or None.
        is_greedy: of each request.
    """
    layout = counters.layout
    ends = drafts.cu_num_draft_tokens.tolist()
    begins = [0, *ends[:-1]]
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    is_sampled = np.repeat(np.logical_not(is_greedy), lengths)
    added = np.zeros((len(layout.shadow), layout.num_speculative_tokens))
    for index, value in enumerate(layout.shadow):
        thresholds = np.full(len(is_sampled), value, dtype=np.float32)
        rows, _ = reference.read_rows(drafts, thresholds, rule, blocked, is_sampled)
        allowed = Allowance(price_units(value) if rule.name == "price" else 0, NO_BOUND, 0, 0)
        for begin, end, request_is_greedy in zip(begins, ends, is_greedy, strict=True):
            if request_is_greedy:
                verdicts = greedy(rows, begin, end, rule.name, allowed)
                chances = [float(v in (Verdict.FIRST, Verdict.RELAXED)) for v in verdicts]
            else:
                chances = []
                for i, position in enumerate(sampled(rows, begin, end, rule.name, allowed), begin):
                    log_p = rows.log_p[i] if rows.log_p is not None else -math.inf
                    if position.verdict == Verdict.RELAXED:
                        chances.append(1.0)
                    elif log_p > -math.inf:
                        log_z = log_partition(log_p, position.bias)
                        chances.append(math.exp(log_p + position.bias - log_z))
                    else:
                        chances.append(0.0)
            added[index, : end - begin] += np.cumprod(chances) / UNIT
    counts = torch.from_numpy(added.round().astype(np.int64)).flatten()
    counters.device_counts[layout.shadowed] += counts.to(counters.device)


def without_bonus_rows(drafts: Drafts) -> Drafts:
    """V2's drafts in the other layout: a row for each draft token, found by its index."""
    if not drafts.bonus_row_is_last:
        return drafts
    ends = drafts.cu_num_draft_tokens.long()
    is_bonus = torch.zeros(len(drafts.draft_token_ids), dtype=torch.bool, device=ends.device)
    is_bonus[ends - 1] = True
    rows = (~is_bonus).nonzero().squeeze(1)
    place = torch.arange(1, len(ends) + 1, device=ends.device)
    return drafts._replace(
        draft_token_ids=drafts.draft_token_ids[rows + 1],
        cu_num_draft_tokens=(ends - place).int(),
        target_rows=rows,
        bonus_row_is_last=False,
    )
