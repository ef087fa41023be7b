"""Price rule: `naive.price` in Triton."""

import triton
import triton.language as tl

from vllm_mars.kernels.budget.fused import at, fits_budget
from vllm_mars.kernels.constants import C
from vllm_mars.kernels.row_stats.combine import forbids
from vllm_mars.kernels.served_dist.fused import (
    RowDecisions,
    log_partition,
    log_share_of,
    max_bias,
    point_mass_dist,
    point_mass_drift,
)


@triton.jit
def greedy(rows, value, remaining, extendable, offset, length):
    price = value
    forbidden = forbids(rows, True)
    is_token = rows.draft >= 0
    is_first = is_token & (rows.draft == rows.argmax)
    may_pay = is_token & (rows.logit > -C.INF) & (rows.first < C.INF) & (price > 0)
    may_pay = may_pay & (offset < extendable) & (is_first == 0)
    wants = may_pay & (forbidden == 0)
    fits = fits_budget(wants, rows.loss, remaining, offset, length)
    verdict = tl.where(wants, tl.where(fits, C.VERDICT.PAYABLE, C.VERDICT.LOSS), 0)
    verdict = tl.where(may_pay & (rows.loss < price) & (forbidden != 0), forbidden, verdict)
    verdict = tl.where(is_first, C.VERDICT.FIRST, verdict)
    # Backwards, V_i = max(0, price + V_(i+1) - r_i), where r_i is 0 for the argmax.
    ahead = tl.zeros([], tl.int64)
    for i in range(0, length):
        j = length - 1 - i
        current = at(offset, j, verdict)
        pays = current == C.VERDICT.PAYABLE
        worth = price + ahead - tl.where(pays, at(offset, j, rows.loss), 0)
        is_reached = ((current == C.VERDICT.FIRST) & (j < extendable)) | (pays & (worth > 0))
        ahead = tl.where(is_reached, worth, 0)
        relaxed = tl.where(worth > 0, C.VERDICT.RELAXED, 0)
        verdict = tl.where((offset == j) & (verdict == C.VERDICT.PAYABLE), relaxed, verdict)
    return verdict


@triton.jit
def sampled(rows, logprobs, value, remaining, extendable, offset, length):
    price = value
    log_p = logprobs.log_p
    is_number = logprobs.is_number
    forbidden = forbids(rows, False)
    # R = 1 - p(S), and H, the sum of -p log p outside S, the preserved tokens.
    rest = tl.maximum(1.0 - logprobs.preserved_mass, 0.0)
    entropy = logprobs.entropy - logprobs.preserved_entropy
    log_share = log_share_of(log_p, rest)
    # Backwards: b_i = price + V_(i+1), V_i = R log Z, or p(x) b_i at a strict position.
    wanted = tl.zeros_like(log_p)
    worth = tl.zeros([], tl.float32)
    for i in range(0, length):
        j = length - 1 - i
        wanted_bias = price.to(tl.float32) * C.UNIT + worth
        worth = tl.where(
            at(offset, j, forbidden) != 0,
            tl.exp(at(offset, j, log_p)) * wanted_bias,
            at(offset, j, rest) * log_partition(at(offset, j, log_share), wanted_bias),
        )
        worth = tl.where(at(offset, j, is_number.to(tl.int32)) != 0, worth, 0.0)
        worth = tl.where(j < extendable, worth, 0.0)
        wanted = tl.where(offset == j, wanted_bias, wanted)
    may_gain = is_number & (offset < extendable)
    wanted = tl.where(may_gain & (forbidden == 0), wanted, 0.0)
    verdict = tl.where(may_gain & (price > 0), forbidden, 0)
    # Forwards: each bias is capped by the budget that earlier positions have left.
    bias = tl.zeros_like(log_p)
    log_z = tl.zeros_like(log_p)
    loss = tl.zeros_like(remaining)
    gained = tl.zeros_like(remaining)
    lost = tl.zeros([], tl.int64)
    for j in range(0, length):
        left = tl.maximum(at(offset, j, remaining) - lost, 0)
        capped_bias = tl.minimum(at(offset, j, wanted), max_bias(left))
        row_log_z, row_loss, row_gain = point_mass_dist(
            at(offset, j, log_share), at(offset, j, rest), capped_bias, left
        )
        is_biased = (offset == j) & (wanted > 0.0)
        bias = tl.where(is_biased, capped_bias, bias)
        log_z = tl.where(is_biased, row_log_z, log_z)
        loss = tl.where(is_biased, row_loss, loss)
        gained = tl.where(is_biased, row_gain, gained)
        lost += tl.sum(tl.where(is_biased, row_loss, 0), axis=0)
    drift = tl.where(bias > 0.0, point_mass_drift(log_z, log_p, rest, entropy), 0.0)
    return RowDecisions(
        verdict=verdict,
        bias=bias,
        log_z=log_z,
        loss=loss,
        gained=gained,
        drift=drift,
    )
