"""Device functions that combine the partial results of `rows_kernel`."""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

from vllm_mars.kernels.budget.fused import ceil_units
from vllm_mars.kernels.constants import C
from vllm_mars.kernels.preserved import is_end
from vllm_mars.kernels.row_stats.fused import unpack_id, unpack_value


class Rows(NamedTuple):
    """Row statistics as vectors on the device: see `row_stats.naive.Rows`."""

    draft: tl.tensor
    argmax: tl.tensor
    # z1
    first: tl.tensor
    # z2, or z1 if the rule does not need it
    second: tl.tensor
    # z[x]
    logit: tl.tensor
    loss: tl.tensor
    is_end: tl.tensor
    is_preserved: tl.tensor
    is_argmax_preserved: tl.tensor
    repeats: tl.tensor
    blocked: tl.tensor


class DraftLogprobs(NamedTuple):
    """Log-probabilities of a fixed draft in a sampled request."""

    # Whether log p of the draft token is above -inf, and not NaN
    is_number: tl.tensor
    # log p of the draft token, at most 0; 0 if not a number
    log_p: tl.tensor
    # H(p) in nats
    entropy: tl.tensor
    # p(S), and the part of H(p) in S, the preserved tokens
    preserved_mass: tl.tensor
    preserved_entropy: tl.tensor


@triton.jit
def reduce_splits(partials, row, mask, num_splits, SPLITS: tl.constexpr, WITH_SECOND: tl.constexpr):
    """Packed z1 of each row, and z2, or z1 if the rule does not need z2."""
    splits = tl.arange(0, SPLITS)
    index = row.to(tl.int64)[:, None] * num_splits + splits[None, :]
    valid = mask[:, None] & (splits < num_splits)[None, :]
    packed = tl.load(partials.best + index, mask=valid, other=-0x7FFFFFFFFFFFFFFF)
    winner = tl.max(packed, axis=1)
    second = unpack_value(winner)
    if WITH_SECOND:
        loses = packed != winner[:, None]
        seconds = tl.load(partials.second + index, mask=valid, other=float("-inf"))
        firsts = tl.where(valid, unpack_value(packed), float("-inf"))
        second = tl.max(tl.where(loses, firsts, seconds), axis=1)
    return winner, second


@triton.jit
def log_sum_exp(partials, row, mask, first, num_splits, SPLITS: tl.constexpr):
    """Log-sum-exp and entropy of each row; `first` is its largest logit."""
    splits = tl.arange(0, SPLITS)
    index = row.to(tl.int64)[:, None] * num_splits + splits[None, :]
    valid = mask[:, None] & (splits < num_splits)[None, :]
    packed = tl.load(partials.best + index, mask=valid, other=-0x7FFFFFFFFFFFFFFF)
    sums = tl.load(partials.sums + 2 * index, mask=valid, other=0.0)
    moments = tl.load(partials.sums + 2 * index + 1, mask=valid, other=0.0)
    largest = tl.where(valid, tl.maximum(unpack_value(packed), C.LEAST), C.LEAST)
    shift = tl.maximum(largest - first[:, None], C.NOTHING)
    total = tl.sum(sums * tl.exp(shift), axis=1)
    moment = tl.sum((moments + sums * shift) * tl.exp(shift), axis=1)
    return first + tl.log(total), tl.log(total) - moment / total


@triton.jit
def draft_log_sum_exp(partials, row, num_splits, SPLITS: tl.constexpr):
    """Log-sum-exp of a draft row at its temperature, base 2; NaN if the row has one."""
    splits = tl.arange(0, SPLITS)
    part_ptr = partials.draft + 2 * (row.to(tl.int64) * num_splits + splits)
    largest = tl.load(part_ptr, mask=splits < num_splits, other=C.LEAST)
    total = tl.load(part_ptr + 1, mask=splits < num_splits, other=0.0)
    row_max = tl.max(largest, axis=0)
    return row_max + tl.log2(tl.sum(total * libdevice.exp2(largest - row_max), axis=0))


@triton.jit
def preserved_sums(partials, row, is_number, lse):
    """Sums of p and of -p log p over the preserved tokens of each row; 0 if not `is_number`."""
    preserved_ptr = partials.preserved + 3 * row
    log_p = tl.load(preserved_ptr, mask=is_number, other=C.LEAST) - lse
    total = tl.load(preserved_ptr + 1, mask=is_number, other=0.0)
    moment = tl.load(preserved_ptr + 2, mask=is_number, other=0.0)
    p = tl.where(is_number, tl.exp(log_p), 0.0)
    surprise = tl.where(p > 0.0, -p * (moment + total * log_p), 0.0)
    return p * total, surprise


@triton.jit
def read_rows(
    partials,
    input_ids_ptr,
    protected,
    constraints,
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
    packed, second = reduce_splits(partials, row, is_row, num_splits, SPLITS, WITH_SECOND)
    first = unpack_value(packed)
    argmax = unpack_id(packed)
    # The draft token of a row is the next entry.
    draft = tl.load(input_ids_ptr + row + 1, mask=is_draft, other=-1).to(tl.int64)
    in_vocab = is_draft & (draft >= 0) & (draft < vocab)
    draft = tl.where(in_vocab, draft, tl.where(draft == C.GRAMMAR_REJECTED, C.GRAMMAR_REJECTED, -1))
    logit = tl.load(partials.logit + row, mask=in_vocab, other=float("-inf"))

    # Infinities and NaN give a NaN loss, which `ceil_units` turns into 0.
    loss = ceil_units(tl.where(draft >= 0, first - logit, 0.0))

    is_stop = is_end(draft, record_ptr) & in_vocab
    is_draft_preserved = is_stop
    is_argmax_preserved = is_end(argmax, record_ptr) & in_vocab
    if protected is not None:
        is_protected = tl.load(protected.mask + draft, mask=in_vocab, other=0) != 0
        is_draft_preserved = is_draft_preserved | is_protected
        is_argmax_protected = tl.load(protected.mask + argmax, mask=in_vocab, other=0) != 0
        is_argmax_preserved = is_argmax_preserved | is_argmax_protected
    repeats = tl.full(draft.shape, False, tl.int1)
    blocked = tl.zeros_like(argmax)
    if constraints is not None:
        blocked = tl.load(constraints.blocked + row, mask=is_draft, other=0).to(tl.int32)
        repeats = tl.load(constraints.repeats + row, mask=in_vocab, other=0) != 0
        if is_greedy:
            is_checked = repeats & (draft != argmax)
            repeats = repeats & (_is_listed(argmax, constraints, row, is_checked) == 0)
    return Rows(
        draft=draft,
        argmax=argmax,
        first=first,
        second=second,
        logit=logit,
        loss=loss,
        is_end=is_stop,
        is_preserved=is_draft_preserved,
        is_argmax_preserved=is_argmax_preserved,
        repeats=repeats,
        blocked=blocked,
    )


@triton.jit
def _is_listed(token, constraints, row, is_checked):
    """Whether the followers of each checked row include the token."""
    count = tl.load(constraints.num_followers + row, mask=is_checked, other=0)
    list_ptr = constraints.followers + row.to(tl.int64) * C.MAX_FOLLOWERS
    is_listed = tl.full(token.shape, False, tl.int1)
    for first in range(0, tl.max(count, axis=0), C.LISTED):
        index = first + tl.arange(0, C.LISTED)[None, :]
        follower = tl.load(list_ptr[:, None] + index, mask=index < count[:, None], other=-1)
        is_same = (follower == token[:, None]).to(tl.int32)
        is_listed = is_listed | (tl.max(is_same, axis=1) != 0)
    return is_listed


@triton.jit
def read_logprobs(rows, partials, row, is_draft, num_splits, SPLITS: tl.constexpr):
    lse, entropy = log_sum_exp(partials, row, is_draft, rows.first, num_splits, SPLITS)
    log_p = rows.logit - lse
    # False for NaN.
    is_number = (rows.draft >= 0) & (log_p > -C.INF)
    preserved_mass, preserved_entropy = preserved_sums(partials, row, is_number, lse)
    return DraftLogprobs(
        is_number=is_number,
        log_p=tl.where(is_number, tl.minimum(log_p, 0.0), 0.0),
        entropy=entropy,
        preserved_mass=preserved_mass,
        preserved_entropy=preserved_entropy,
    )


@triton.jit
def num_extendable(is_end, offset, length, tokens_left):
    return tl.minimum(tl.min(tl.where(is_end, offset, length), axis=0), tokens_left)


@triton.jit
def forbids(rows, checks_argmax):
    is_strict = rows.is_preserved | (rows.is_argmax_preserved & checks_argmax)
    reason = tl.where(is_strict, C.VERDICT.PROTECTED, tl.where(rows.repeats, C.VERDICT.REPEAT, 0))
    return tl.where(rows.blocked != 0, rows.blocked, reason)
