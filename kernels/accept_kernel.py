"""The kernel that decides, draws and counts; `accept` launches it and says what it does."""

import triton
import triton.language as tl

from vllm_mars.kernels.terms import (
    DRAWN_SCALE,
    END_NATS,
    LOSS_BITS,
    MOST_BALANCE,
    MOST_LOSS,
    MOST_PRICE,
    NO_BOUND,
    NO_LIMIT,
    PRICE_BURSTS,
    RATE_BITS,
    Verdict,
)
from vllm_mars.kernels.top2 import log_sum_exp, reduce_splits, unpack_id, unpack_value

_PAYABLE = tl.constexpr(int(Verdict.PAYABLE))
_RELAXED = tl.constexpr(int(Verdict.RELAXED))
_FIRST = tl.constexpr(int(Verdict.FIRST))
_PROTECTED = tl.constexpr(int(Verdict.PROTECTED))
_LOSS = tl.constexpr(int(Verdict.LOSS))
_RATE_SHIFT = tl.constexpr(RATE_BITS - LOSS_BITS)
_UNIT = tl.constexpr(2.0**-LOSS_BITS)
_PER_NAT = tl.constexpr(2.0**LOSS_BITS)
_MOST_LOSS = tl.constexpr(float(MOST_LOSS))
_MOST_PRICE = tl.constexpr(MOST_PRICE)
_MOST_BALANCE = tl.constexpr(MOST_BALANCE)
_NO_BOUND = tl.constexpr(NO_BOUND)
_NO_LIMIT = tl.constexpr(NO_LIMIT)
_PRICE_BURSTS = tl.constexpr(PRICE_BURSTS)
_DRAWN_SCALE = tl.constexpr(DRAWN_SCALE)
_END_NATS = tl.constexpr(END_NATS)
# Rounded down by more than a float can be off.
_CAUTION = tl.constexpr(1 - 2**-20)
# vLLM's `tl_rand32`, which draws the same numbers, is never 0 but this.
_LEAST_DRAWN = tl.constexpr(4.6566127342e-10)
_INF = tl.constexpr(float("inf"))

# Index arrays, records and outputs, often views that start anywhere: their alignment would multiply
# the compiled variants and gain nothing.
_RECORDS = [
    *("threshold_ptr", "price_ptr", "scale_ptr", "rate_ptr", "lost_ptr"),
    *("most_tokens_ptr", "ends_ptr"),
]
_UNALIGNED = [
    *("output_token_ids_ptr", "num_accepted_ptr", "num_relaxed_ptr", "step_lost_ptr"),
    *("counts_ptr", "table_ptr", "prices_ptr", "clipped_ptr", "logits_ptr"),
    *("draft_token_ids_ptr", "bonus_ptr", "target_rows_ptr", "cu_num_draft_tokens_ptr"),
    *("protected_ptr", "blocked_ptr", "slots_ptr", "produced_ptr", "prompt_len_ptr"),
    *("temperature_ptr", "seeds_ptr", "pos_ptr", "drawn_at_ptr"),
    *_RECORDS,
]
_UNSPECIALIZED = [
    *("num_draft", "width", "burst", "num_splits", "longest", "has_blocked"),
    *("logits_stride", "vocab"),
]


@triton.jit
def integer_root(square):
    """floor(sqrt(square)) of an int64 below 2**62; exact for a guess within 2**-19 of it."""
    root = tl.maximum(tl.sqrt(square.to(tl.float32)).to(tl.int64), 1)
    # Newton's step ends at the root or 1 above it, however the float rounded.
    root = (root + square // root) >> 1
    return root - (root * root > square).to(tl.int64)


@triton.jit
def _nearest_units(nats):
    """Nats of either sign in units, rounded to the nearest; 0 of what is no number."""
    units = tl.minimum(tl.maximum(nats * _PER_NAT, -_MOST_LOSS), _MOST_LOSS)
    return tl.floor(tl.where(nats == nats, units, 0.0) + 0.5).to(tl.int64)


@triton.jit
def log_ratio_of_clipped(log_p, log_q, log_w, price, log_total):
    """log m - log p of tokens of a row that `clip_kernel` has read; see `clip`."""
    return tl.minimum(tl.maximum(log_q - log_p, log_w), log_w + price) - log_total


@triton.jit
def _at(offset, j, values):
    """The value at one offset."""
    return tl.sum(tl.where(offset == j, values, tl.zeros_like(values)), axis=0)


@triton.jit
def _log_partition(log_p, bias):
    """log(1 - p + p exp(bias)), for p in (0, 1]."""
    # log(0) is -inf, which then adds nothing.
    rest = tl.log(tl.maximum(1.0 - tl.exp(log_p), 0.0))
    # Where p is small 1 - p loses its digits: -p is log(1 - p) there.
    rest = tl.where(log_p < -9.0, -tl.exp(log_p), rest)
    tilted = log_p + bias
    most = tl.maximum(rest, tilted)
    log_z = most + tl.log(tl.exp(rest - most) + tl.exp(tilted - most))
    # Exactly 0 without a bias, which a sum of rounded logarithms is not.
    return tl.where(bias > 0.0, log_z, 0.0)


@triton.jit
def _log_drawn(seeds_ptr, pos_ptr, slot, position, mask):
    """The logarithm of what vLLM draws for each position."""
    pos = tl.load(pos_ptr + position, mask=mask, other=0)
    return tl.log(tl.maximum(tl.rand(tl.load(seeds_ptr + slot), pos), _LEAST_DRAWN))


@triton.jit
def _finish(
    counts_ptr,
    table_ptr,
    lost_ptr,
    request,
    slot,
    offset,
    is_draft,
    draft,
    verdict,
    loss,
    gained,
    drift,
    ratio,
    accepted,
    is_counted,
    is_greedy,
    longest,
):
    """Counts a request's step, takes its loss off; returns relaxed tokens and the loss."""
    is_draft &= is_counted
    is_visited = is_draft & (offset <= accepted)
    is_accepted = is_draft & (offset < accepted)
    is_relaxed = is_accepted & (verdict == _RELAXED)
    spends = is_relaxed | (is_visited & (is_greedy == 0))
    step_lost = tl.sum(tl.where(spends, loss, 0), axis=0)
    step_gained = tl.sum(tl.where(spends, gained, 0), axis=0)
    tl.store(lost_ptr + slot, tl.load(lost_ptr + slot) + step_lost)

    one = tl.full(offset.shape, 1, tl.int64)
    is_verified = is_visited & (draft >= 0)
    tl.atomic_add(counts_ptr + offset, one, mask=is_verified)
    tl.atomic_add(counts_ptr + longest + offset, one, mask=is_verified & is_accepted)
    tl.atomic_add(counts_ptr + 2 * longest + offset, one, mask=is_verified & is_relaxed)
    tl.atomic_add(counts_ptr + 3 * longest, step_lost)
    tl.atomic_add(counts_ptr + 3 * longest + 1, step_gained)
    drift = tl.where(spends, drift, 0)
    tl.atomic_add(counts_ptr + 3 * longest + 2, tl.sum(tl.maximum(drift, 0), axis=0))
    tl.atomic_add(counts_ptr + 3 * longest + 3, tl.sum(tl.maximum(-drift, 0), axis=0))
    is_refused = is_verified & (verdict >= _PROTECTED)
    refusal = tl.maximum(verdict - _PROTECTED, 0)
    tl.atomic_add(counts_ptr + 3 * longest + 4 + refusal, one, mask=is_refused)

    of_greedy = tl.where(is_relaxed, loss.to(tl.float32) * _UNIT, float("nan"))
    of_sampled = tl.where(offset <= accepted, ratio, float("nan"))
    row = tl.where(is_greedy, of_greedy, of_sampled)
    where = table_ptr + request.to(tl.int64) * 2 * (longest + 1) + offset
    tl.store(where, row, mask=offset <= longest)
    row = tl.where(is_greedy, 0.0, drift.to(tl.float32) * _UNIT)
    tl.store(where + longest + 1, row, mask=offset <= longest)
    return tl.sum(is_relaxed.to(tl.int32), axis=0), step_lost


@triton.jit(
    do_not_specialize=_UNSPECIALIZED,
    do_not_specialize_on_alignment=_UNALIGNED,
)
def accept_kernel(
    # [batch, width], and three of [batch]
    output_token_ids_ptr,
    num_accepted_ptr,
    num_relaxed_ptr,
    step_lost_ptr,
    # [count_size], [batch, 2, longest + 1]
    counts_ptr,
    table_ptr,
    # [num_rows], prices of drawn drafts, or what is below 0 where nothing is drawn
    prices_ptr,
    # [num_rows, num_splits] each
    best_ptr,
    second_ptr,
    sums_ptr,
    # [*, vocab]
    logits_ptr,
    logits_stride,
    # [num_draft]
    draft_token_ids_ptr,
    # [batch]: bonus tokens
    bonus_ptr,
    # [num_draft]
    target_rows_ptr,
    # [batch], inclusive prefix sum
    cu_num_draft_tokens_ptr,
    # [vocab]
    protected_ptr,
    # [num_draft]
    blocked_ptr,
    # [batch]
    slots_ptr,
    # By slot
    threshold_ptr,
    price_ptr,
    scale_ptr,
    rate_ptr,
    lost_ptr,
    most_tokens_ptr,
    # [S, ENDS]
    ends_ptr,
    # [batch]; on V2 all tokens by slot, less the prompt's
    produced_ptr,
    prompt_len_ptr,
    # Where requests sample: two by slot, and [num_draft]
    temperature_ptr,
    seeds_ptr,
    pos_ptr,
    # Of drawn drafts: [num_draft, 8] of `clip_kernel`, [S, steps, vocab], and by slot
    clipped_ptr,
    draft_logits_ptr,
    draft_stride,
    draft_step_stride,
    drawn_at_ptr,
    burst,
    num_draft,
    width,
    longest,
    vocab,
    num_splits,
    has_blocked,
    SPLITS: tl.constexpr,
    POSITIONS: tl.constexpr,
    ENDS: tl.constexpr,
    # "theta" or "price"
    RULE: tl.constexpr,
    HAS_TARGET_ROWS: tl.constexpr,
    HAS_PROTECTED: tl.constexpr,
    # "no", "ids" or "rows"
    BONUS: tl.constexpr,
    # Layout of Model Runner V2: a request's last row is its bonus row, and a row's draft token
    # stands one entry behind it.
    IS_V2: tl.constexpr,
    # "no"; "fixed" or "drawn" drafts, in the layout of V2; or "prices", of those that are drawn
    SAMPLED: tl.constexpr,
):
    request = tl.program_id(0)
    end = tl.load(cu_num_draft_tokens_ptr + request)
    start = tl.load(cu_num_draft_tokens_ptr + request - 1, mask=request > 0, other=0)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    offset = tl.arange(0, POSITIONS)
    position = start + offset
    is_row = position < end
    length = end - start
    is_draft = is_row
    if IS_V2:
        is_draft = position < end - 1
        draft_token_ids_ptr += 1
        length -= 1

    # What the request may pay and lose.
    lost_before = tl.load(lost_ptr + slot)
    left_before = burst - lost_before
    rate = tl.load(rate_ptr + slot)
    if IS_V2:
        produced = tl.load(produced_ptr + slot) - tl.load(prompt_len_ptr + slot)
    else:
        produced = tl.load(produced_ptr + request)
    most = ((rate * (produced.to(tl.int64) + offset + 1)) >> _RATE_SHIFT) + left_before
    most = tl.where(rate == _NO_BOUND, _NO_LIMIT, most)
    price = tl.load(price_ptr + slot)
    scale = tl.load(scale_ptr + slot)
    # True, as a scalar of the device.
    is_greedy = slot >= 0
    if SAMPLED != "no":
        is_greedy = tl.load(temperature_ptr + slot) == 0.0
    if SAMPLED == "drawn" or SAMPLED == "prices":
        is_drawn = is_greedy == 0
        scale = tl.where(is_drawn, tl.minimum(_DRAWN_SCALE * scale, _MOST_BALANCE), scale)
    # The burst as int64.
    most_balance = tl.minimum(_PRICE_BURSTS * (left_before + lost_before), _MOST_BALANCE)
    balance = tl.minimum(tl.maximum(_at(offset, 0, most), 0), most_balance)
    follows = tl.minimum(integer_root(scale * balance), _MOST_PRICE)
    price = tl.where(scale != 0, follows, price)
    threshold = tl.load(threshold_ptr + slot) + tl.zeros([POSITIONS], tl.float32)

    # The rows.
    row = position.to(tl.int64)
    if HAS_TARGET_ROWS:
        row = tl.load(target_rows_ptr + position, mask=is_draft, other=0).to(tl.int64)
    packed, second = reduce_splits(
        best_ptr, second_ptr, position, is_row, num_splits, SPLITS, RULE != "price"
    )
    first = unpack_value(packed)
    argmax = unpack_id(packed)
    draft = tl.load(draft_token_ids_ptr + position, mask=is_draft, other=-1).to(tl.int64)
    in_vocab = is_draft & (draft >= 0) & (draft < vocab)
    draft = tl.where(in_vocab, draft, -1)
    where = logits_ptr + row * logits_stride + draft
    logit = tl.load(where, mask=in_vocab, other=float("-inf")).to(tl.float32)
    # Of infinities and a NaN no number comes out, which compares with nothing.
    loss = first - logit
    units = tl.ceil(tl.minimum(loss * _PER_NAT, _MOST_LOSS))
    loss = tl.where(in_vocab & (loss == loss), units, 0.0).to(tl.int64)
    # Where a token of the answer can still come behind the position's.
    end_token = tl.load(ends_ptr + slot * ENDS + tl.arange(0, ENDS)).to(tl.int64)
    is_end = in_vocab & (tl.max((draft[:, None] == end_token[None, :]).to(tl.int32), axis=1) != 0)
    room = tl.maximum(tl.load(most_tokens_ptr + slot) - produced - 1, 0)
    gainful = tl.minimum(tl.min(tl.where(is_end, offset, length), axis=0), room)
    is_gainful = offset < gainful
    if RULE == "price":
        payable = in_vocab & (logit > float("-inf")) & (first < _INF) & (price > 0) & is_gainful
        pays = payable & (loss < price)
    else:
        # Launched without fusion, so that the product is rounded, as in torch.
        payable = (second > threshold * first) & ((threshold == 1.0) | (first > 0.0))
        payable = payable & in_vocab & (logit >= second)
        pays = payable
    of_argmax = tl.max((argmax.to(tl.int64)[:, None] == end_token[None, :]).to(tl.int32), axis=1)
    forbidden = tl.where(is_end | (in_vocab & (of_argmax != 0)), _PROTECTED, 0)
    if SAMPLED != "no":
        is_token = (end_token >= 0) & (end_token < vocab)
        of_end = tl.load(
            logits_ptr + row[:, None] * logits_stride + end_token[None, :],
            mask=in_vocab[:, None] & is_token[None, :],
            other=float("-inf"),
        )
        may_end = (is_greedy == 0) & (tl.max(of_end.to(tl.float32), axis=1) >= first - _END_NATS)
        forbidden = tl.where(in_vocab & may_end, _PROTECTED, forbidden)
    if HAS_PROTECTED:
        of_draft = tl.load(protected_ptr + draft, mask=in_vocab, other=0)
        of_argmax = tl.load(protected_ptr + argmax, mask=in_vocab, other=0)
        forbidden = tl.where((of_draft != 0) | (of_argmax != 0), _PROTECTED, forbidden)
    is_given = is_draft & (tl.zeros([POSITIONS], tl.int32) + has_blocked != 0)
    blocked = tl.load(blocked_ptr + position, mask=is_given, other=0).to(tl.int32)
    forbidden = tl.where(blocked != 0, blocked, forbidden)

    # Greedy requests.
    verdict = tl.where(payable, tl.where(forbidden == 0, _PAYABLE, 0), 0)
    verdict = tl.where(pays & (forbidden != 0), forbidden, verdict)
    verdict = tl.where(in_vocab & (draft == argmax), _FIRST, verdict)
    lost = tl.zeros([], tl.int64)
    for j in range(0, length):
        here = (offset == j) & (verdict == _PAYABLE)
        weight = tl.sum(tl.where(here, loss, 0), axis=0)
        fits = lost + weight <= _at(offset, j, most)
        verdict = tl.where(here & (fits == 0), _LOSS, verdict)
        lost += tl.where(fits, weight, 0)
    if RULE == "price":
        ahead = tl.zeros([], tl.int64)
        for i in range(0, length):
            j = length - 1 - i
            now = _at(offset, j, verdict)
            value = price + ahead - tl.where(now == _PAYABLE, _at(offset, j, loss), 0)
            reached = ((now == _FIRST) & (j < gainful)) | ((now == _PAYABLE) & (value > 0))
            ahead = tl.where(reached, value, 0)
            relaxed = tl.where(value > 0, _RELAXED, 0)
            verdict = tl.where((offset == j) & (verdict == _PAYABLE), relaxed, verdict)
    else:
        verdict = tl.where(verdict == _PAYABLE, _RELAXED, verdict)
    gained = tl.where(verdict == _RELAXED, 1 << 16, 0).to(tl.int64)

    accepts = (verdict == _FIRST) | (verdict == _RELAXED)
    # Greedily the drift is the loss.
    drift = loss
    ratio_accepted = tl.zeros([POSITIONS], tl.float32)
    ratio_rejected = tl.zeros([POSITIONS], tl.float32)
    if SAMPLED == "drawn" or SAMPLED == "prices":
        # What may be lost is shared by the positions at which something can be gained.
        share = tl.maximum(_at(offset, 0, most), 0) // tl.maximum(gainful, 1)
        cap = tl.sqrt(8.0 * share.to(tl.float32) * _UNIT) * _CAUTION
        may_pay = in_vocab & is_gainful & (forbidden == 0)
        prices = tl.where(may_pay, tl.minimum(price.to(tl.float32) * _UNIT, cap), 0.0)
        is_read = in_vocab & (is_greedy == 0)
    if SAMPLED == "drawn":
        if is_greedy == 0:
            verdict = tl.where(in_vocab & is_gainful & (price > 0), forbidden, 0)
            of_row = clipped_ptr + 8 * position
            log_w = tl.load(of_row, mask=is_read, other=0.0)
            row_price = tl.load(of_row + 1, mask=is_read, other=0.0)
            log_total = tl.load(of_row + 2, mask=is_read, other=0.0)
            log_p = logit - tl.load(of_row + 3, mask=is_read, other=0.0)
            log_q = tl.load(
                draft_logits_ptr
                + slot * draft_stride
                + offset.to(tl.int64) * draft_step_stride
                + draft,
                mask=is_read,
                other=float("-inf"),
            ).to(tl.float32)
            log_q = log_q / tl.load(drawn_at_ptr + slot)
            log_q -= tl.load(of_row + 4, mask=is_read, other=0.0)
            ratio_accepted = log_ratio_of_clipped(log_p, log_q, log_w, row_price, log_total)
            lost_nats = tl.load(of_row + 5, mask=is_read, other=0.0)
            loss = tl.ceil(tl.minimum(lost_nats * _PER_NAT, _MOST_LOSS)).to(tl.int64)
            gained = _nearest_units(tl.load(of_row + 6, mask=is_read, other=0.0))
            drift = _nearest_units(tl.load(of_row + 7, mask=is_read, other=0.0))
            log_u = _log_drawn(seeds_ptr, pos_ptr, slot, position, is_draft)
            accepts = is_read & (log_p + ratio_accepted > log_u + log_q)
    if SAMPLED == "fixed":
        if is_greedy == 0:
            lse, entropy = log_sum_exp(
                best_ptr, sums_ptr, position, is_draft, first, num_splits, SPLITS
            )
            log_p = logit - lse
            # A NaN is above nothing.
            is_number = in_vocab & (log_p > float("-inf"))
            log_p = tl.where(is_number, tl.minimum(log_p, 0.0), 0.0)
            verdict = tl.zeros([POSITIONS], tl.int32)
            loss = tl.zeros([POSITIONS], tl.int64)
            gained = tl.zeros([POSITIONS], tl.int64)
            bias = tl.zeros([POSITIONS], tl.float32)
            log_z = tl.zeros([POSITIONS], tl.float32)
            lost = tl.zeros([], tl.int64)
            if RULE == "price":
                wanted = tl.zeros([POSITIONS], tl.float32)
                value = tl.zeros([], tl.float32)
                for i in range(0, length):
                    j = length - 1 - i
                    own_bias = price.to(tl.float32) * _UNIT + value
                    own_log_p = _at(offset, j, log_p)
                    is_strict = _at(offset, j, forbidden) != 0
                    value = tl.where(
                        is_strict,
                        tl.exp(own_log_p) * own_bias,
                        _log_partition(own_log_p, own_bias),
                    )
                    value = tl.where(_at(offset, j, is_number.to(tl.int32)) != 0, value, 0.0)
                    value = tl.where(j < gainful, value, 0.0)
                    wanted = tl.where(offset == j, own_bias, wanted)
                wanted = tl.where(is_number & is_gainful & (forbidden == 0), wanted, 0.0)
                refused = is_number & is_gainful & (price > 0)
                verdict = tl.where(refused, forbidden, 0)
                for j in range(0, length):
                    left = tl.maximum(_at(offset, j, most) - lost, 0)
                    cap = tl.sqrt(8.0 * left.to(tl.float32) * _UNIT) * _CAUTION
                    own_bias = tl.minimum(_at(offset, j, wanted), cap)
                    own_log_p = _at(offset, j, log_p)
                    own_log_z = _log_partition(own_log_p, own_bias)
                    a = tl.exp(tl.minimum(own_log_p + own_bias - own_log_z, 0.0))
                    k = tl.maximum(a * own_bias - own_log_z, 0.0)
                    # No more than what is left, by Hoeffding's lemma; a float may say a unit more.
                    own_loss = tl.minimum(
                        tl.ceil(tl.minimum(k * _PER_NAT, _MOST_LOSS)).to(tl.int64), left
                    )
                    own_gain = tl.maximum(a - tl.exp(own_log_p), 0.0) * _PER_NAT + 0.5
                    is_tilted = (offset == j) & (wanted > 0.0)
                    bias = tl.where(is_tilted, own_bias, bias)
                    log_z = tl.where(is_tilted, own_log_z, log_z)
                    loss = tl.where(is_tilted, own_loss, loss)
                    gained = tl.where(is_tilted, own_gain.to(tl.int64), gained)
                    lost += tl.sum(tl.where(is_tilted, own_loss, 0), axis=0)
                share = 1.0 - tl.exp(-log_z)
                drift_nats = tl.where(bias > 0.0, share * (-log_p - entropy), 0.0)
            else:
                outright = payable & is_number
                cost = tl.ceil(tl.minimum(-log_p * _PER_NAT, _MOST_LOSS)).to(tl.int64)
                verdict = tl.where(outright, tl.where(forbidden != 0, forbidden, _RELAXED), 0)
                for j in range(0, length):
                    here = (offset == j) & (verdict == _RELAXED)
                    weight = tl.sum(tl.where(here, cost, 0), axis=0)
                    fits = weight <= _at(offset, j, most) - lost
                    verdict = tl.where(here & (fits == 0), _LOSS, verdict)
                    lost += tl.where(fits, weight, 0)
                is_relaxed = verdict == _RELAXED
                bias = tl.where(is_relaxed, _INF, 0.0)
                log_z = tl.where(is_relaxed, log_p, 0.0)
                loss = tl.where(is_relaxed, cost, 0)
                chance = (1.0 - tl.exp(log_p)) * _PER_NAT + 0.5
                gained = tl.where(is_relaxed, chance.to(tl.int64), 0)
                drift_nats = tl.where(is_relaxed, -log_p - entropy, 0.0)
            drift = _nearest_units(drift_nats)
            log_u = _log_drawn(seeds_ptr, pos_ptr, slot, position, is_draft)
            # What the rule accepts outright has an infinite bias.
            accepts = is_number & (log_p + bias - log_z > log_u)
            ratio_accepted = tl.where(bias == _INF, -log_p, bias - log_z)
            ratio_rejected = -log_z

    if SAMPLED == "prices":
        tl.store(prices_ptr + position, tl.where(is_read, prices, -1.0), mask=is_row)
    else:
        stops = is_draft & (accepts == 0)
        accepted = tl.min(tl.where(stops, offset, length), axis=0)
        token = tl.where(offset < accepted, draft, -1)
        # Never accepted, V2's bonus row emits its argmax like a row whose draft is rejected. What
        # is drawn there, `insert_kernel` adds.
        first_choice = tl.where(is_greedy, argmax.to(tl.int64), -1)
        token = tl.where(is_row & (offset == accepted), first_choice, token)
        if BONUS == "ids":
            bonus = tl.load(bonus_ptr + request).to(tl.int64)
            token = tl.where((offset == length) & (accepted == length), bonus, token)
        if BONUS == "rows":
            bonus_row = num_draft + request + tl.zeros([1], tl.int32)
            of_bonus, _ = reduce_splits(
                best_ptr, second_ptr, bonus_row, bonus_row >= 0, num_splits, SPLITS, False
            )
            bonus = tl.max(unpack_id(of_bonus), axis=0).to(tl.int64)
            token = tl.where((offset == length) & (accepted == length), bonus, token)
        tl.store(
            output_token_ids_ptr + request.to(tl.int64) * width + offset,
            token.to(output_token_ids_ptr.dtype.element_ty),
            mask=offset < width,
        )
        ratio = tl.where(offset < accepted, ratio_accepted, ratio_rejected)
        # Behind the draft the target's own bonus token follows.
        ratio = tl.where(is_draft, ratio, 0.0)
        num_relaxed, step_lost = _finish(
            counts_ptr,
            table_ptr,
            lost_ptr,
            request,
            slot,
            offset,
            is_draft,
            draft,
            verdict,
            loss,
            gained,
            drift,
            ratio,
            accepted,
            offset <= gainful,
            is_greedy,
            longest,
        )
        # V2 counts the token behind the drafts, too.
        tl.store(num_accepted_ptr + request, accepted + (1 if IS_V2 else 0))
        tl.store(num_relaxed_ptr + request, num_relaxed)
        tl.store(step_lost_ptr + request, step_lost)
