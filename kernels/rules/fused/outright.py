"""Rules that accept tokens outright: `naive.outright` in Triton."""

import triton
import triton.language as tl

from vllm_mars.kernels.budget.fused import ceil_units, fits_budget
from vllm_mars.kernels.constants import C
from vllm_mars.kernels.row_stats.combine import forbids
from vllm_mars.kernels.served_dist.fused import RowDecisions


@triton.jit
def _judged(rows, is_accepted, loss, remaining, offset, length):
    forbidden = forbids(rows, True)
    wants = is_accepted & (forbidden == 0)
    fits = fits_budget(wants, loss, remaining, offset, length)
    verdict = tl.where(wants, tl.where(fits, C.VERDICT.RELAXED, C.VERDICT.LOSS), forbidden)
    return tl.where(is_accepted, verdict, 0)


@triton.jit
def greedy(rows, is_accepted, remaining, offset, length):
    is_first = (rows.draft >= 0) & (rows.draft == rows.argmax)
    is_other = is_accepted & (is_first == 0)
    verdict = _judged(rows, is_other, rows.loss, remaining, offset, length)
    return tl.where(is_first, C.VERDICT.FIRST, verdict)


@triton.jit
def sampled(rows, logprobs, is_accepted, remaining, offset, length):
    # -log p(x), the loss of an accepted token
    cost = ceil_units(-logprobs.log_p)
    verdict = _judged(rows, is_accepted & logprobs.is_number, cost, remaining, offset, length)
    is_relaxed = verdict == C.VERDICT.RELAXED
    # m(x) - p(x) = 1 - p(x)
    gained = ((1.0 - tl.exp(logprobs.log_p)) * C.PER_NAT + 0.5).to(tl.int64)
    return RowDecisions(
        verdict=verdict,
        bias=tl.where(is_relaxed, C.INF, 0.0),
        log_z=tl.where(is_relaxed, logprobs.log_p, 0.0),
        loss=tl.where(is_relaxed, cost, 0),
        gained=tl.where(is_relaxed, gained, 0),
        # -log p(x) - H(p)
        drift=tl.where(is_relaxed, -logprobs.log_p - logprobs.entropy, 0.0),
    )
