"""The rule in Triton, function by function as `rule` has it, for one request of a step.

Vectors have POSITIONS entries, one for each row of the request: its draft positions, then its bonus
row, then padding. Nats are integers in units of 2**-LOSS_BITS where a name says units, or where
they decide of a greedy request. Launched without fusion, so that products are rounded as in torch.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from vllm_mars.kernels.constants import C
from vllm_mars.kernels.kept.fused import is_end
from vllm_mars.kernels.law.fused import (
    Decided,
    cap,
    log_partition,
    log_share_of,
    tilted,
    tilted_drift,
)
from vllm_mars.kernels.ledger.fused import units_of
from vllm_mars.kernels.rows.fused import reduce_splits, unpack_id, unpack_value


class Rows(NamedTuple):
    """As `rows.naive.Rows`: vectors on the device, with the largest logits and the draft token's.

    `second` is z2 by theta alone.
    """

    draft: tl.tensor
    argmax: tl.tensor
    first: tl.tensor
    second: tl.tensor
    logit: tl.tensor
    is_end: tl.tensor
    is_kept: tl.tensor
    keeps_first: tl.tensor
    repeats: tl.tensor
    blocked: tl.tensor


@triton.jit
def _at(offset, j, values):
    """The value at one offset."""
    return tl.sum(tl.where(offset == j, values, tl.zeros_like(values)), axis=0)


@triton.jit
def read_rows(
    partials,
    input_ids_ptr,
    protected,
    guard,
    record_ptr,
    row,
    is_row,
    is_draft,
    is_greedy,
    vocab,
    num_splits,
    SPLITS: tl.constexpr,
    WITH_SECOND: tl.constexpr,
):
    """What the rule reads of the rows."""
    packed, second = reduce_splits(partials, row, is_row, num_splits, SPLITS, WITH_SECOND)
    first = unpack_value(packed)
    argmax = unpack_id(packed)
    # A row's draft token is the next one's input.
    draft = tl.load(input_ids_ptr + row + 1, mask=is_draft, other=-1).to(tl.int64)
    in_vocab = is_draft & (draft >= 0) & (draft < vocab)
    draft = tl.where(in_vocab, draft, tl.where(draft == C.STRUCK, C.STRUCK, -1))
    logit = tl.load(partials.logit + row, mask=in_vocab, other=float("-inf"))

    ends = is_end(draft, record_ptr) & in_vocab
    keeps_draft = ends
    keeps_first = is_end(argmax, record_ptr) & in_vocab
    if protected is not None:
        keeps_draft = keeps_draft | (tl.load(protected.mask + draft, mask=in_vocab, other=0) != 0)
        of_first = tl.load(protected.mask + argmax, mask=in_vocab, other=0) != 0
        keeps_first = keeps_first | of_first
    repeats = draft < draft
    blocked = tl.zeros_like(argmax)
    if guard is not None:
        blocked = tl.load(guard.blocked + row, mask=is_draft, other=0).to(tl.int32)
        repeats = tl.load(guard.repeats + row, mask=in_vocab, other=0) != 0
        if is_greedy:
            looks = repeats & (draft != argmax)
            repeats = repeats & (_is_listed(argmax, guard, row, looks) == 0)
    kept = keeps_draft, keeps_first
    return Rows(draft, argmax, first, second, logit, ends, *kept, repeats, blocked)


@triton.jit
def _is_listed(token, guard, row, looks):
    """Whether the guard lists each row's token there, of rows that are looked at."""
    count = tl.load(guard.num_followers + row, mask=looks, other=0)
    list_ptr = guard.followers + row.to(tl.int64) * C.MOST_FOLLOWERS
    found = token < token
    for first in range(0, tl.max(count, axis=0), C.LISTED):
        number = first + tl.arange(0, C.LISTED)[None, :]
        is_there = number < count[:, None]
        follower = tl.load(list_ptr[:, None] + number, mask=is_there, other=-1)
        is_same = (follower == token[:, None]).to(tl.int32)
        found = found | (tl.max(is_same, axis=1) != 0)
    return found


@triton.jit
def num_gainful(is_end, offset, length, room):
    """How many positions of a given draft can be followed by a further token of the answer."""
    return tl.minimum(tl.min(tl.where(is_end, offset, length), axis=0), room)


@triton.jit
def forbids(rows, with_first):
    """Why each position is strict, or 0."""
    is_strict = rows.is_kept | (rows.keeps_first & with_first)
    reason = tl.where(is_strict, C.PROTECTED, tl.where(rows.repeats, C.REPEAT, 0))
    return tl.where(rows.blocked != 0, rows.blocked, reason)


@triton.jit
def is_small(rows, threshold):
    """Where the draft token is one of the two largest and the margin between them is small."""
    threshold += tl.zeros_like(rows.first)
    small = (rows.second > threshold * rows.first) & ((threshold == 1.0) | (rows.first > 0.0))
    return small & (rows.draft >= 0) & (rows.logit >= rows.second)


@triton.jit
def greedy(rows, small, most, price, gainful, offset, length, RULE: tl.constexpr):
    """Verdict and loss, in units, of each position."""
    forbidden = forbids(rows, True)
    is_read = rows.draft >= 0
    # Of infinities and a NaN no number comes out, which compares with nothing.
    loss = units_of(tl.where(is_read, rows.first - rows.logit, 0.0))
    may_pay = small
    pays = small
    if RULE == "price":
        may_pay = is_read & (rows.logit > -C.INF) & (rows.first < C.INF) & (price > 0)
        may_pay = may_pay & (offset < gainful)
        pays = may_pay & (loss < price)
    verdict = tl.where(may_pay & (forbidden == 0), C.PAYABLE, 0)
    verdict = tl.where(pays & (forbidden != 0), forbidden, verdict)
    verdict = tl.where(is_read & (rows.draft == rows.argmax), C.FIRST, verdict)
    lost = tl.zeros([], tl.int64)
    for j in range(0, length):
        here = (offset == j) & (verdict == C.PAYABLE)
        weight = tl.sum(tl.where(here, loss, 0), axis=0)
        fits = lost + weight <= _at(offset, j, most)
        verdict = tl.where(here & (fits == 0), C.LOSS, verdict)
        lost += tl.where(fits, weight, 0)
    if RULE == "price":
        ahead = tl.zeros([], tl.int64)
        for i in range(0, length):
            j = length - 1 - i
            now = _at(offset, j, verdict)
            value = price + ahead - tl.where(now == C.PAYABLE, _at(offset, j, loss), 0)
            reached = ((now == C.FIRST) & (j < gainful)) | ((now == C.PAYABLE) & (value > 0))
            ahead = tl.where(reached, value, 0)
            relaxed = tl.where(value > 0, C.RELAXED, 0)
            verdict = tl.where((offset == j) & (verdict == C.PAYABLE), relaxed, verdict)
    else:
        verdict = tl.where(verdict == C.PAYABLE, C.RELAXED, verdict)
    return verdict, loss


@triton.jit
def sampled_by_price(
    log_p, rest, entropy, is_number, forbidden, most, price, gainful, offset, length
):
    """What is decided at each position of a fixed draft.

    `entropy` is that of the tokens that are not kept, and `rest` what p has there.
    """
    log_share = log_share_of(log_p, rest)
    wanted = tl.zeros_like(log_p)
    value = tl.zeros([], tl.float32)
    for i in range(0, length):
        j = length - 1 - i
        own_bias = price.to(tl.float32) * C.UNIT + value
        value = tl.where(
            _at(offset, j, forbidden) != 0,
            tl.exp(_at(offset, j, log_p)) * own_bias,
            _at(offset, j, rest) * log_partition(_at(offset, j, log_share), own_bias),
        )
        value = tl.where(_at(offset, j, is_number.to(tl.int32)) != 0, value, 0.0)
        value = tl.where(j < gainful, value, 0.0)
        wanted = tl.where(offset == j, own_bias, wanted)
    may_gain = is_number & (offset < gainful)
    wanted = tl.where(may_gain & (forbidden == 0), wanted, 0.0)
    verdict = tl.where(may_gain & (price > 0), forbidden, 0)
    bias = tl.zeros_like(log_p)
    log_z = tl.zeros_like(log_p)
    loss = tl.zeros_like(most)
    gained = tl.zeros_like(most)
    lost = tl.zeros([], tl.int64)
    for j in range(0, length):
        left = tl.maximum(_at(offset, j, most) - lost, 0)
        own_bias = tl.minimum(_at(offset, j, wanted), cap(left))
        own_log_share, own_rest = _at(offset, j, log_share), _at(offset, j, rest)
        own_log_z, own_loss, own_gain = tilted(own_log_share, own_rest, own_bias, left)
        is_tilted = (offset == j) & (wanted > 0.0)
        bias = tl.where(is_tilted, own_bias, bias)
        log_z = tl.where(is_tilted, own_log_z, log_z)
        loss = tl.where(is_tilted, own_loss, loss)
        gained = tl.where(is_tilted, own_gain, gained)
        lost += tl.sum(tl.where(is_tilted, own_loss, 0), axis=0)
    drift = tl.where(bias > 0.0, tilted_drift(log_z, log_p, rest, entropy), 0.0)
    return Decided(verdict, bias, log_z, loss, gained, drift)


@triton.jit
def sampled_by_theta(log_p, entropy, small, forbidden, most, offset, length):
    """The same, where the draft token is accepted outright: then its bias is infinite."""
    cost = units_of(-log_p)
    verdict = tl.where(small, tl.where(forbidden != 0, forbidden, C.RELAXED), 0)
    lost = tl.zeros([], tl.int64)
    for j in range(0, length):
        here = (offset == j) & (verdict == C.RELAXED)
        weight = tl.sum(tl.where(here, cost, 0), axis=0)
        fits = weight <= _at(offset, j, most) - lost
        verdict = tl.where(here & (fits == 0), C.LOSS, verdict)
        lost += tl.where(fits, weight, 0)
    is_relaxed = verdict == C.RELAXED
    gained = ((1.0 - tl.exp(log_p)) * C.PER_NAT + 0.5).to(tl.int64)
    return Decided(
        verdict,
        tl.where(is_relaxed, C.INF, 0.0),
        tl.where(is_relaxed, log_p, 0.0),
        tl.where(is_relaxed, cost, 0),
        tl.where(is_relaxed, gained, 0),
        tl.where(is_relaxed, -log_p - entropy, 0.0),
    )
