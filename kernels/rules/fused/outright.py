"""What rules have in common that accept a token outright: `naive.outright` in Triton."""

import triton
import triton.language as tl

from vllm_mars.kernels.constants import C
from vllm_mars.kernels.law.fused import Decided
from vllm_mars.kernels.ledger.fused import fitting, units_of
from vllm_mars.kernels.rows.joined import forbids


@triton.jit
def _judged(rows, is_accepted, loss, most, offset, length):
    """Verdicts at what the rule accepts."""
    forbidden = forbids(rows, True)
    wants = is_accepted & (forbidden == 0)
    fits = fitting(wants, loss, most, offset, length)
    verdict = tl.where(wants, tl.where(fits, C.VERDICT.RELAXED, C.VERDICT.LOSS), forbidden)
    return tl.where(is_accepted, verdict, 0)


@triton.jit
def greedy(rows, is_accepted, most, offset, length):
    """Verdicts of a greedy request."""
    is_first = (rows.draft >= 0) & (rows.draft == rows.argmax)
    is_other = is_accepted & (is_first == 0)
    verdict = _judged(rows, is_other, rows.loss, most, offset, length)
    return tl.where(is_first, C.VERDICT.FIRST, verdict)


@triton.jit
def sampled(rows, odds, is_accepted, most, offset, length):
    """What is decided where a request samples; of what is accepted the bias is infinite."""
    cost = units_of(-odds.log_p)
    verdict = _judged(rows, is_accepted & odds.is_number, cost, most, offset, length)
    is_relaxed = verdict == C.VERDICT.RELAXED
    gained = ((1.0 - tl.exp(odds.log_p)) * C.PER_NAT + 0.5).to(tl.int64)
    return Decided(
        verdict,
        tl.where(is_relaxed, C.INF, 0.0),
        tl.where(is_relaxed, odds.log_p, 0.0),
        tl.where(is_relaxed, cost, 0),
        tl.where(is_relaxed, gained, 0),
        tl.where(is_relaxed, -odds.log_p - odds.entropy, 0.0),
    )
