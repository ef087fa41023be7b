"""Verification in Triton: two launches for a step of greedy requests, three where requests sample.

The rule is that of `rule`, which `rule_kernel` follows function by function (arXiv 2601.15498 for
theta). Symbols: V vocabulary, B requests, R rows, S splits of a row.

    rows_kernel      grid (R, S)       z1 with its id, z2, and sums of exponentials of each split
    accept_kernel    grid (B,)         joins the splits of one request's rows, applies the rule,
                                       draws whether each draft token stays, emits and counts
    resample_kernel  grid (B, blocks)  draws the token behind the accepted drafts of a request
                                       that samples, from one row

Where drafts are drawn, the two of `clip_kernel` read the rows between the first two. The random
numbers are those of vLLM's own sampler: what is strict is token for token what that emits, of drawn
drafts by its method `block`.

To count is to take the loss off the request's record, to add to the counts, and to write its row of
the table: see `Account`. What a request allows lies in its record, by slot, and is read there.

Bytes moved: the rows once, but the bonus row of a request that samples; of such a request one row
again; the logits of the draft token and of kept tokens; the partial results, the outputs. Not
materialised: anything of the logits' size.
"""

from typing import Any

import torch
import triton

from vllm_mars.kernels.accept_kernel import accept_kernel
from vllm_mars.kernels.rows import num_lanes, reduce_rows
from vllm_mars.kernels.terms import Account, CounterLayout, Draws, Rule, Step, VerifyOutput

# Small batches share variants: fewer than 8 positions cost no less.
_MIN_POSITIONS = 8
# Logits of a block of the draw; the noise of a token is the same in a block of any size. On an H200
# few large blocks take half the time of many small ones where 16 requests sample, and no more where
# 64 do.
_DRAW_BLOCK = 16_384
# Of each request, blocks of the draw that have ended.
_ENDED: dict[torch.device, torch.Tensor] = {}


def accept(
    step: Step,
    rule: Rule,
    blocked: torch.Tensor | None = None,
    account: Account | None = None,
    draws: Draws | None = None,
) -> VerifyOutput:
    """Verifies a step; what its requests lose is added to their records.

    Args:
        step: its logits are processed, where requests sample.
        rule: of the engine.
        blocked: int8 `[num_rows]`, a `Verdict` at each row whose draft token must stay strict,
            else 0.
        account: where the step is counted; without a table one is made.
        draws: of the step, where requests sample.

    Returns:
        As in `cpu.accept`, but that the tokens are int64, as Model Runner V2 wants them.
    """
    batch, device = step.slots.shape[0], step.logits.device
    output = VerifyOutput(
        torch.empty((batch, step.num_speculative_tokens + 1), dtype=torch.int64, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int64, device=device),
    )
    if not batch:
        return output
    if account is None:
        size = CounterLayout(step.num_speculative_tokens).size
        account = Account(torch.zeros(size, dtype=torch.int64, device=device), None)
    if account.table is None:
        table = torch.empty((batch, 2, step.num_speculative_tokens + 1), device=device)
        account = account._replace(table=table)
    shared = rule_arguments(step, rule, blocked, draws)
    kind, clipped, masses = "no" if draws is None else "fixed", None, None
    if draws is not None and draws.sampling.draft_logits is not None:
        from vllm_mars.kernels.clip_kernel import clip_rows

        kind, (clipped, masses) = "drawn", clip_rows(step.logits, draws, shared)
    num_blocks = 1 if masses is None else masses.shape[1]
    positions = shared["POSITIONS"]
    accept_kernel[(batch,)](
        output,
        account,
        cu_num_logits_ptr=step.cu_num_logits,
        slots_ptr=step.slots,
        pos_ptr=None if draws is None else draws.pos,
        clipped_ptr=clipped,
        masses_ptr=masses,
        share_gain=rule.share_gain,
        num_speculative_tokens=step.num_speculative_tokens,
        num_blocks=num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
        RULE=rule.name,
        SAMPLED=kind,
        # Long drafts leave one warp too few registers.
        num_warps=max(1, positions // 8),
        **shared,
    )
    if draws is not None:
        _draw(step, draws, clipped, output, account, shared)
    return output


def rule_arguments(
    step: Step, rule: Rule, blocked: torch.Tensor | None, draws: Draws | None
) -> dict[str, Any]:
    """Launches `rows_kernel`; what the kernels that apply the rule take, as `accept` has it."""
    (num_rows, vocab), device = step.logits.shape, step.logits.device
    if blocked is None:
        blocked = torch.zeros(num_rows, dtype=torch.int8, device=device)
    partials, num_splits = reduce_rows(step, rule, draws)
    return {
        "partials": partials,
        "records_ptr": step.records.table,
        "input_ids_ptr": step.input_ids,
        "protected": rule.protected,
        "blocked_ptr": blocked,
        "total_len_ptr": step.total_len,
        "prompt_len_ptr": step.prompt_len,
        "sampling": None if draws is None else draws.sampling,
        "vocab": vocab,
        "num_splits": num_splits,
        "SPLITS": num_lanes(vocab),
        "POSITIONS": max(_MIN_POSITIONS, triton.next_power_of_2(step.num_speculative_tokens + 1)),
        "enable_fp_fusion": False,
    }


def _draw(
    step: Step,
    draws: Draws,
    clipped: torch.Tensor | None,
    output: VerifyOutput,
    account: Account,
    shared: dict[str, Any],
) -> None:
    """Adds the token behind the accepted drafts of each request that samples."""
    from vllm_mars.kernels.draw_kernel import resample_kernel

    batch, device = step.slots.shape[0], step.logits.device
    is_drawn = draws.sampling.draft_logits is not None
    # Two rows take twice the registers.
    draw_block = min(_DRAW_BLOCK >> is_drawn, triton.next_power_of_2(shared["vocab"]))
    num_blocks = triton.cdiv(shared["vocab"], draw_block)
    tokens = torch.empty((batch, num_blocks), dtype=torch.int32, device=device)
    values = torch.empty_like(tokens, dtype=torch.float64 if draws.use_fp64 else torch.float32)
    names = ("records_ptr", "input_ids_ptr", "vocab", "protected")
    draft_logits = draws.sampling.draft_logits
    strides = (0, 0) if draft_logits is None else draft_logits.stride()[:2]
    resample_kernel[(batch, num_blocks)](
        output.output_token_ids,
        account.table,
        tokens,
        values,
        _none_ended(batch, device),
        step.logits,
        step.logits.stride(0),
        clipped_ptr=clipped,
        sampling=draws.sampling,
        draft_stride=strides[0],
        draft_step_stride=strides[1],
        num_sampled_ptr=output.num_emitted,
        cu_num_logits_ptr=step.cu_num_logits,
        slots_ptr=step.slots,
        pos_ptr=draws.pos,
        num_speculative_tokens=step.num_speculative_tokens,
        num_blocks=num_blocks,
        BLOCK=draw_block,
        BLOCKS=triton.next_power_of_2(num_blocks),
        USE_FP64=draws.use_fp64,
        num_warps=max(4, draw_block // (512 if is_drawn else 1024)),
        **{name: shared[name] for name in names},
    )


def _none_ended(batch: int, device: torch.device) -> torch.Tensor:
    """Zeros of a batch at least, which are kept, and 0 again after each step."""
    found = _ENDED.get(device)
    if found is None or len(found) < batch:
        size = triton.next_power_of_2(max(batch, 4096))
        found = _ENDED[device] = torch.zeros(size, dtype=torch.int32, device=device)
    return found
