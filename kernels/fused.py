"""Verification of a step in Triton: which kernels are launched, in which order.

Symbols: B requests, R rows, S splits of a row.

    rows_kernel      grid (R, S)       z1 with its id, and what else of each split the rule needs
    clip_kernel      grid (R,)         where drafts are drawn: what is served at each row
    mass_kernel      grid (R, blocks)  likewise, of drafts of more than one token: see `blocks`
    accept_kernel    grid (B,)         which draft tokens stay; emits and counts
    resample_kernel  grid (B, blocks)  where requests sample: the token behind these

What the text asks of each row `strictness_kernel` has found before.

Bytes moved: the rows once, but the bonus row of a request that samples; of such a request one row
again; the logits of the draft token and of kept tokens; the partial results, the outputs; for drawn
drafts see `law`. Not materialised: anything of the logits' size.
"""

import functools

import torch

from vllm_mars.kernels.accept.fused import accept
from vllm_mars.kernels.account.naive import Account, CounterLayout
from vllm_mars.kernels.blocks.fused import sum_residuals
from vllm_mars.kernels.law.fused import clip_rows
from vllm_mars.kernels.rows.fused import kept_size, reduce_rows
from vllm_mars.kernels.step import Draws, Step, Terms, VerifyOutput
from vllm_mars.kernels.strictness.naive import Guard


def verify(
    step: Step,
    terms: Terms,
    guard: Guard | None = None,
    account: Account | None = None,
    draws: Draws | None = None,
) -> VerifyOutput:
    """Verifies a step; what its requests lose is added to their records.

    Args:
        step: its logits are processed, where requests sample.
        terms: of the engine.
        guard: what the text before each row asks; or None, where it asks nothing.
        account: where the step is written down; what is not given is made, and dropped.
        draws: of the step, where requests sample.

    Returns:
        As in `kernels.naive.verify`, but that the tokens are int64.
    """
    output, account = _new_output(step), _whole(account, step)
    if not step.slots.shape[0]:
        return output
    reduced = reduce_rows(step, terms, guard, draws)
    clipped = masses = None
    if draws is not None and draws.sampling.draft_logits is not None:
        clipped = clip_rows(reduced, draws)
        masses = sum_residuals(reduced, draws, clipped)
    accept(reduced, output, account, clipped, masses)
    if draws is not None:
        # Its noise is vLLM's, without which `verify_greedy` works.
        from vllm_mars.kernels.draw.fused import draw

        draw(reduced, draws, clipped, output, account)
    return output


def _new_output(step: Step) -> VerifyOutput:
    batch, device = step.slots.shape[0], step.logits.device
    return VerifyOutput(
        torch.empty((batch, step.num_speculative_tokens + 1), dtype=torch.int64, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int64, device=device),
    )


def _whole(account: Account | None, step: Step) -> Account:
    width, device = step.num_speculative_tokens, step.logits.device
    if account is None:
        size = CounterLayout(width).size
        account = Account(torch.zeros(size, dtype=torch.int64, device=device), None)
    if account.table is None:
        size = kept_size(step.slots.shape[0], 256)
        account = account._replace(table=_kept_table(size, width + 1, device))
    return account


@functools.cache
def _kept_table(batch: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.empty((batch, 2, width), device=device)
