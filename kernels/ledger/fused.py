"""What a request may lose, in Triton: see `ledger.naive`."""

import triton
import triton.language as tl

from vllm_mars.kernels.constants import C


@triton.jit
def units_of(nats):
    """Nats in units, rounded up; 0 of what is no number."""
    return tl.ceil(tl.minimum(tl.where(nats == nats, nats * C.PER_NAT, 0.0), C.MOST_LOSS)).to(
        tl.int64
    )


@triton.jit
def nearest_units(nats):
    """Nats of either sign in units, rounded to the nearest; 0 of what is no number."""
    units = tl.minimum(tl.maximum(nats * C.PER_NAT, -C.MOST_LOSS), C.MOST_LOSS)
    return tl.floor(tl.where(nats == nats, units, 0.0) + 0.5).to(tl.int64)


@triton.jit
def at(offset, j, values):
    """The value at one offset."""
    return tl.sum(tl.where(offset == j, values, tl.zeros_like(values)), axis=0)


@triton.jit
def fitting(wants, loss, most, offset, length):
    """Which of the positions that want to, in turn, can lose what they would; units."""
    lost = tl.zeros([], tl.int64)
    for j in range(0, length):
        here = (offset == j) & wants
        weight = tl.sum(tl.where(here, loss, 0), axis=0)
        fits = lost + weight <= at(offset, j, most)
        wants = wants & ((here == 0) | fits)
        lost += tl.where(fits, weight, 0)
    return wants


@triton.jit
def allowance(record_ptr, produced, offset):
    """What the request may lose up to each offset, in units, its rule's value, and its room."""
    rate = tl.load(record_ptr + C.COLUMN.RATE)
    tokens = produced.to(tl.int64) + offset + 1
    most = (rate * (tokens + C.BURST_TOKENS)) >> C.RATE_SHIFT
    most -= tl.load(record_ptr + C.COLUMN.LOST)
    most = tl.where(rate == C.NO_BOUND, C.NO_LIMIT, most)
    room = tl.maximum(tl.load(record_ptr + C.COLUMN.MOST_TOKENS) - produced - 1, 0)
    return most, tl.load(record_ptr + C.COLUMN.VALUE), room


@triton.jit
def has_ended(record_ptr, last, produced):
    """1 where the request had ended before this step, else 0."""
    ends = tl.load(record_ptr + C.COLUMN.ENDS + tl.arange(0, C.MOST_ENDS))
    is_end = tl.max((ends == last).to(tl.int32), axis=0)
    is_end = tl.where((produced > 0) & (last >= 0), is_end, 0)
    return tl.where(produced >= tl.load(record_ptr + C.COLUMN.MOST_TOKENS), 1, is_end)
