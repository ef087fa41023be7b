"""Verification in Triton: two launches for a step of greedy requests, four where requests sample.

The rule is that of `rule`, which this follows line by line (arXiv 2601.15498 for theta). Symbols: V
vocabulary, N draft positions, B requests, R rows that are read, S splits of a row.

    top2_kernel      grid (R, S)       z1 with its id, z2, and sums of exponentials of each split
    accept_kernel    grid (B,)         joins the splits of one request's rows, applies the rule,
                                       draws whether each draft token stays, emits and counts
    resample_kernel  grid (B, blocks)  draws the token behind the accepted drafts of a request
    insert_kernel    grid (B,)         that samples, from one row

Where drafts are drawn, `accept_kernel` first tells what each position may pay, and `clip_kernel`
reads the rows for it. The random numbers are those of vLLM's own sampler: what is strict is token
for token the same.

To count is to take the loss off the request's record, to add to the counts, and to write its row of
the table: see `Account`. What a request allows lies in its record, by slot, and is read there.

Bytes moved: the rows once, but the bonus row of a request that samples; of such a request one row
again; one logit of each draft token; the partial results, the outputs. Not materialised: anything
of the logits' size.
"""

from typing import Any

import torch
import triton

from vllm_mars.kernels.accept_kernel import accept_kernel
from vllm_mars.kernels.terms import (
    Account,
    Drafts,
    Draws,
    Requests,
    Rule,
    VerifyOutput,
    count_size,
)
from vllm_mars.kernels.top2 import Partials, reduce_rows

# Small batches share variants: fewer than 8 positions cost no less.
_MIN_POSITIONS = 8
# Of the draw, as vLLM's; the noise of a token is the same in a block of any size.
_DRAW_BLOCK = 1024
# What stands in for positions of which none must stay strict, by device.
_NONE_BLOCKED: dict[torch.device, torch.Tensor] = {}
# What `accept_kernel` and the kernels of the draw take alike.
_OF_DRAWS = [
    *("logits_ptr", "logits_stride", "draft_logits_ptr", "draft_stride", "draft_step_stride"),
    *("drawn_at_ptr", "draft_token_ids_ptr", "cu_num_draft_tokens_ptr", "slots_ptr"),
    "temperature_ptr",
]


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
    output, batch = _output(drafts), drafts.cu_num_draft_tokens.shape[0]
    account = _account(account, drafts)
    if batch:
        _, arguments = _arguments(drafts, requests, rule, blocked, account, None)
        accept_kernel[(batch,)](
            *output,
            prices_ptr=None,
            clipped_ptr=None,
            SAMPLED="no",
            **arguments,
        )
    return output


def accept_sampled(
    drafts: Drafts,
    requests: Requests,
    rule: Rule,
    draws: Draws,
    blocked: torch.Tensor | None = None,
    account: Account | None = None,
) -> VerifyOutput:
    """Verifies a step in which requests sample; what they lose is added to their records.

    Args:
        drafts: the step's, in V2's layout; the logits are processed.
        requests: of the step.
        rule: of the engine.
        draws: of the step.
        blocked: as in `accept`.
        account: as in `accept`.

    Returns:
        As in `accept`.
    """
    from vllm_mars.kernels.clip_kernel import clip_rows
    from vllm_mars.kernels.draw_kernel import insert_kernel, resample_kernel

    output, account = _output(drafts), _account(account, drafts)
    batch, vocab = drafts.cu_num_draft_tokens.shape[0], drafts.logits.shape[1]
    if not batch:
        return output
    partials, arguments = _arguments(drafts, requests, rule, blocked, account, draws)
    kind, prices, clipped = "fixed", None, None
    if draws.draft_logits is not None:
        assert draws.drawn_at is not None, "drafts are drawn at a temperature"
        kind = "drawn"
        prices = torch.empty(drafts.draft_token_ids.shape[0], device=drafts.logits.device)
        accept_kernel[(batch,)](
            *output, prices_ptr=prices, clipped_ptr=None, SAMPLED="prices", **arguments
        )
        clipped = clip_rows(drafts, partials, prices, draws)
    accept_kernel[(batch,)](
        *output, prices_ptr=prices, clipped_ptr=clipped, SAMPLED=kind, **arguments
    )
    num_blocks = triton.cdiv(vocab, _DRAW_BLOCK)
    tokens = torch.empty((batch, num_blocks), dtype=torch.int32, device=drafts.logits.device)
    values = torch.empty_like(tokens, dtype=torch.float64 if draws.use_fp64 else torch.float32)
    shared: dict[str, Any] = {
        "token_ptr": tokens,
        "value_ptr": values,
        "clipped_ptr": clipped,
        "num_sampled_ptr": output.num_accepted,
        "num_blocks": num_blocks,
        **{name: arguments[name] for name in _OF_DRAWS},
    }
    resample_kernel[(batch, num_blocks)](
        **shared,
        seeds_ptr=draws.seeds,
        pos_ptr=draws.pos,
        vocab=vocab,
        BLOCK=_DRAW_BLOCK,
        USE_FP64=draws.use_fp64,
    )
    if clipped is None:
        # Without them rows of all dtypes share a variant.
        shared["logits_ptr"] = None
    insert_kernel[(batch,)](
        **shared,
        output_token_ids_ptr=output.output_token_ids,
        table_ptr=account.table,
        width=output.output_token_ids.shape[1],
        longest=account.longest,
        BLOCKS=triton.next_power_of_2(num_blocks),
    )
    return output


def _output(drafts: Drafts) -> VerifyOutput:
    batch, device = drafts.cu_num_draft_tokens.shape[0], drafts.logits.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    dtype = torch.int64 if drafts.bonus_row_is_last else torch.int32
    return VerifyOutput(
        empty(batch, drafts.max_draft_len + 1, dtype=dtype),
        empty(batch),
        empty(batch),
        empty(batch, dtype=torch.int64),
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
    account: Account,
    draws: Draws | None,
) -> tuple[Partials, dict[str, Any]]:
    """Launches `top2_kernel`; returns its results and what `accept_kernel` takes of a step."""
    records, is_v2 = requests.records, drafts.bonus_row_is_last
    device = drafts.logits.device
    if device not in _NONE_BLOCKED:
        _NONE_BLOCKED[device] = torch.zeros(1, dtype=torch.int8, device=device)
    none_blocked = _NONE_BLOCKED[device]
    of_rows = None if draws is None else (draws.row_slots, draws.row_places, draws.temperature)
    partials = reduce_rows(drafts, rule.name != "price", of_rows)
    draft_logits = None if draws is None else draws.draft_logits
    positions = num_positions(max(rule.longest, drafts.max_draft_len))
    bonus = "no"
    if drafts.bonus_rows is not None:
        bonus = "rows"
    elif drafts.bonus_token_ids is not None:
        bonus = "ids"
    return partials, {
        "counts_ptr": account.counts,
        "table_ptr": account.table,
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
        "temperature_ptr": None if draws is None else draws.temperature,
        "seeds_ptr": None if draws is None else draws.seeds,
        "pos_ptr": None if draws is None else draws.pos,
        "draft_logits_ptr": draft_logits,
        "draft_stride": 0 if draft_logits is None else draft_logits.stride(0),
        "draft_step_stride": 0 if draft_logits is None else draft_logits.stride(1),
        "drawn_at_ptr": None if draws is None or draft_logits is None else draws.drawn_at,
        "burst": rule.burst,
        "num_draft": drafts.draft_token_ids.shape[0],
        "width": drafts.max_draft_len + 1,
        "longest": account.longest,
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
