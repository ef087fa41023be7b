"""Verification in Triton: two launches for a step of greedy requests, three around vLLM's sampling.

The rule is that of `rule`, which this follows line by line (arXiv 2601.15498 for theta). Symbols: V
vocabulary, N draft positions, B requests, R rows that are read, S splits of a row.

    top2_kernel    grid (R, S)   z1 with its id, z2, and the sum of exponentials of each split
    accept_kernel  grid (B,)     joins the splits of one request's rows and applies the rule. A step
                                 of greedy requests it finishes; where requests sample it adds the
                                 bias of the rule to the draft tokens' logits
    settle_kernel  grid (B,)     after vLLM's rejection sampler: restores the logits and finishes

To finish is to emit, to take the loss off the request's record, to count, and to write its row of
the table: see `Account`. What a request allows lies in its record, by slot, and is read there.

Bytes moved: the rows once, one logit of each draft token again, the partial results, the outputs.
Not materialised: anything of the logits' size. Where drafts are drawn, `clip` writes rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from vllm_mars.kernels.accept_kernel import accept_kernel, settle_kernel
from vllm_mars.kernels.clip import Clipped
from vllm_mars.kernels.terms import (
    Account,
    Drafts,
    Requests,
    Rule,
    VerifyOutput,
    count_size,
)
from vllm_mars.kernels.top2 import reduce_rows

# Small batches share variants: fewer than 8 positions cost no less.
_MIN_POSITIONS = 8
# What stands in for positions of which none must stay strict, by device.
_NONE_BLOCKED: dict[torch.device, torch.Tensor] = {}


class Plan(NamedTuple):
    """What was decided about a step in which requests sample.

    Attributes:
        floats: `[num_draft, 4]` float32: the draft tokens' logits before, the bias, log Z, drift.
        integers: `[num_draft, 3]` int32: verdict, loss, gained.
        temperature: as given.
        clipped: where drafts are drawn, the rows that are served instead.
        prices: `[num_draft]` float32, with `clipped`.
    """

    floats: torch.Tensor
    integers: torch.Tensor
    temperature: torch.Tensor
    clipped: Clipped | None
    prices: torch.Tensor


def num_positions(max_draft_len: int) -> int:
    """POSITIONS: a power of 2 that holds the drafts and the bonus token."""
    return max(_MIN_POSITIONS, triton.next_power_of_2(max_draft_len + 1))


def accept(
    drafts: Drafts,
    requests: Requests,
    rule: Rule,
    blocked: torch.Tensor | None = None,
    account: Account | None = None,
) -> VerifyOutput:
    """Verifies a step of greedy requests; what they lose is added to their records.

    Args:
        drafts: the step's, in either layout.
        requests: of the step.
        rule: of the engine.
        blocked: int8 `[num_draft]`, a `Verdict` at each position that must stay strict, else 0.
        account: where the step is counted; without a table one is made.

    Returns:
        As in `cpu.accept`. In V2's layout the tokens are int64, and `num_accepted` counts the token
        behind the drafts, too, as that runner wants it.
    """
    batch, device = drafts.cu_num_draft_tokens.shape[0], drafts.logits.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    dtype = torch.int64 if drafts.bonus_row_is_last else torch.int32
    output = VerifyOutput(
        empty(batch, drafts.max_draft_len + 1, dtype=dtype),
        empty(batch),
        empty(batch),
        empty(batch, dtype=torch.int64),
    )
    if batch:
        accept_kernel[(batch,)](
            *output,
            floats_ptr=None,
            integers_ptr=None,
            prices_ptr=None,
            temperature_ptr=None,
            SAMPLED="no",
            **_arguments(drafts, requests, rule, blocked, _account(account, drafts), False),
        )
    return output


def plan(
    drafts: Drafts,
    requests: Requests,
    rule: Rule,
    temperature: torch.Tensor,
    blocked: torch.Tensor | None = None,
    clip: Callable[[torch.Tensor], Clipped] | None = None,
) -> Plan:
    """Decides about a step in which requests sample, and adds it to the draft tokens' logits.

    Args:
        drafts: the step's, with processed float32 logits, a row for each draft in order.
        requests: of the step; their records are read.
        rule: of the engine.
        temperature: float32 `[batch]`, or by slot in V2's layout; 0 is greedy.
        blocked: as in `accept`.
        clip: makes `clip_rows` of the prices at the positions, where drafts are drawn.
    """
    num_draft, device = drafts.draft_token_ids.shape[0], drafts.logits.device
    batch = drafts.cu_num_draft_tokens.shape[0]
    floats = torch.empty((num_draft, 4), device=device)
    integers = torch.empty((num_draft, 3), dtype=torch.int32, device=device)
    prices = torch.empty(num_draft, device=device)
    if batch:
        accept_kernel[(batch,)](
            None,
            None,
            None,
            None,
            floats_ptr=floats,
            integers_ptr=integers,
            prices_ptr=prices,
            temperature_ptr=temperature,
            SAMPLED="fixed" if clip is None else "drawn",
            **_arguments(drafts, requests, rule, blocked, None, clip is None),
        )
    clipped = None if clip is None else clip(prices)
    return Plan(floats, integers, temperature, clipped, prices)


def settle(
    plan: Plan,
    drafts: Drafts,
    requests: Requests,
    output_token_ids: torch.Tensor,
    account: Account | None = None,
    num_sampled: torch.Tensor | None = None,
) -> None:
    """Restores the logits that `plan` changed, and writes down what the step did.

    Args:
        plan: of this step.
        drafts: the step's.
        requests: of the step; what they lost is added to their records.
        output_token_ids: int `[batch, width]`, -1 behind the last token.
        account: where the step is counted.
        num_sampled: int32 `[batch]`, in V2's layout: how many of them count.
    """
    batch = drafts.cu_num_draft_tokens.shape[0]
    if not batch:
        return
    clipped, account = plan.clipped, _account(account, drafts)
    served = drafts.logits if clipped is None else clipped.logits
    settle_kernel[(batch,)](
        account.counts,
        account.table,
        requests.records.lost,
        drafts.logits,
        drafts.logits.stride(0),
        plan.floats,
        plan.integers,
        served,
        served.stride(0),
        None if clipped is None else clipped.losses,
        None if clipped is None else clipped.gained,
        None if clipped is None else clipped.drift,
        None if clipped is None else clipped.target_lse,
        plan.prices,
        output_token_ids,
        num_sampled,
        drafts.draft_token_ids,
        drafts.cu_num_draft_tokens,
        requests.slots,
        plan.temperature,
        output_token_ids.shape[1],
        account.longest,
        drafts.logits.shape[1],
        POSITIONS=num_positions(max(account.longest, drafts.max_draft_len)),
        IS_V2=drafts.bonus_row_is_last,
        IS_DRAWN=clipped is not None,
        num_warps=1,
    )


def _account(account: Account | None, drafts: Drafts) -> Account:
    """An account with all of its tensors."""
    device = drafts.logits.device
    if account is None:
        longest = max(drafts.max_draft_len, 1)
        counts = torch.zeros(count_size(longest), dtype=torch.int64, device=device)
        account = Account(counts, None, longest)
    if account.table is None:
        shape = drafts.cu_num_draft_tokens.shape[0], 2, account.longest + 1
        account = account._replace(table=torch.empty(shape, device=device))
    return account


def _arguments(
    drafts: Drafts,
    requests: Requests,
    rule: Rule,
    blocked: torch.Tensor | None,
    account: Account | None,
    with_sum: bool,
) -> dict[str, Any]:
    """Launches `top2_kernel`; returns what `accept_kernel` takes of a step."""
    records, is_v2 = requests.records, drafts.bonus_row_is_last
    device = drafts.logits.device
    if device not in _NONE_BLOCKED:
        _NONE_BLOCKED[device] = torch.zeros(1, dtype=torch.int8, device=device)
    none_blocked = _NONE_BLOCKED[device]
    # Of float32 rows the sum is always found: all steps of processed logits share a variant.
    with_sum |= drafts.logits.dtype == torch.float32
    partials = reduce_rows(drafts, rule.name != "price", with_sum)
    positions = num_positions(max(rule.longest, drafts.max_draft_len))
    bonus = "no"
    if drafts.bonus_rows is not None:
        bonus = "rows"
    elif drafts.bonus_token_ids is not None:
        bonus = "ids"
    return {
        "counts_ptr": None if account is None else account.counts,
        "table_ptr": None if account is None else account.table,
        "best_ptr": partials.best,
        "second_ptr": partials.second,
        "sums_ptr": partials.sums,
        "logits_ptr": drafts.logits,
        "logits_stride": drafts.logits.stride(0),
        "draft_token_ids_ptr": drafts.draft_token_ids,
        "bonus_ptr": drafts.bonus_token_ids,
        "target_rows_ptr": drafts.target_rows,
        "cu_num_draft_tokens_ptr": drafts.cu_num_draft_tokens,
        "protected_ptr": rule.protected,
        "blocked_ptr": none_blocked if blocked is None else blocked,
        "slots_ptr": requests.slots,
        "threshold_ptr": records.threshold,
        "price_ptr": records.price,
        "scale_ptr": records.price_scale,
        "rate_ptr": records.rate,
        "lost_ptr": records.lost,
        "most_tokens_ptr": records.most_tokens,
        "ends_ptr": records.ends,
        "produced_ptr": requests.total_len if is_v2 else requests.produced,
        "prompt_len_ptr": requests.prompt_len,
        "burst": rule.burst,
        "num_draft": drafts.draft_token_ids.shape[0],
        "width": drafts.max_draft_len + 1,
        "longest": 0 if account is None else account.longest,
        "vocab": drafts.logits.shape[1],
        "num_splits": partials.num_splits,
        "has_blocked": int(blocked is not None),
        "SPLITS": partials.splits,
        "POSITIONS": positions,
        "ENDS": records.ends.shape[1],
        "RULE": rule.name,
        "HAS_TARGET_ROWS": drafts.target_rows is not None,
        "HAS_PROTECTED": rule.protected is not None,
        "BONUS": bonus,
        "IS_V2": is_v2,
        # One warp needs no barrier between the steps of its loops.
        "num_warps": 1 if positions * partials.splits <= 512 else 4,
        "enable_fp_fusion": False,
    }
