"""What a request may lose, in Triton: see `budget.naive`."""

import triton
import triton.language as tl

from vllm_mars.kernels.constants import C


@triton.jit
def ceil_units(nats):
    """Nats in units, rounded up; 0 of what is no number."""
    return tl.ceil(tl.minimum(tl.where(nats == nats, nats * C.PER_NAT, 0.0), C.MAX_LOSS)).to(
        tl.int64
    )


@triton.jit
def round_units(nats):
    """Nats of either sign in units, rounded to the nearest; 0 of what is no number."""
    units = tl.minimum(tl.maximum(nats * C.PER_NAT, -C.MAX_LOSS), C.MAX_LOSS)
    return tl.floor(tl.where(nats == nats, units, 0.0) + 0.5).to(tl.int64)


@triton.jit
def at(offset, j, values):
    """The value at one offset."""
    return tl.sum(tl.where(offset == j, values, tl.zeros_like(values)), axis=0)


@triton.jit
def fits_budget(wants, loss, remaining, offset, length):
    """Which of the positions that want to, in turn, can lose what they would; units."""
    lost = tl.zeros([], tl.int64)
    for j in range(0, length):
        here = (offset == j) & wants
        weight = tl.sum(tl.where(here, loss, 0), axis=0)
        fits = lost + weight <= at(offset, j, remaining)
        wants = wants & ((here == 0) | fits)
        lost += tl.where(fits, weight, 0)
    return wants


@triton.jit
def load_budget(record_ptr, produced, offset):
    """What the request may lose up to each offset, in units, its rule's value, and its room."""
    rate = tl.load(record_ptr + C.COLUMN.RATE)
    tokens = produced.to(tl.int64) + offset + 1
    remaining = (rate * (tokens + C.BURST_TOKENS)) >> C.RATE_SHIFT
    remaining -= tl.load(record_ptr + C.COLUMN.LOST)
    remaining = tl.where(rate == C.NO_BOUND, C.NO_LIMIT, remaining)
    tokens_left = tl.maximum(tl.load(record_ptr + C.COLUMN.MAX_TOKENS) - produced - 1, 0)
    return remaining, tl.load(record_ptr + C.COLUMN.VALUE), tokens_left


@triton.jit
def has_ended(record_ptr, last, produced):
    """1 where the request had ended before this step, else 0."""
    stop_ids = tl.load(record_ptr + C.COLUMN.STOP_IDS + tl.arange(0, C.MAX_STOP_IDS))
    is_end = tl.max((stop_ids == last).to(tl.int32), axis=0)
    is_end = tl.where((produced > 0) & (last >= 0), is_end, 0)
    return tl.where(produced >= tl.load(record_ptr + C.COLUMN.MAX_TOKENS), 1, is_end)
