"""Loss budget of a request in Triton: see `kernels.budget`."""

import triton
import triton.language as tl

from vllm_mars.kernels.constants import C


@triton.jit
def ceil_units(nats):
    """Rounds nats up to units, at most MAX_LOSS; NaN becomes 0."""
    return tl.ceil(tl.minimum(tl.where(nats == nats, nats * C.PER_NAT, 0.0), C.MAX_LOSS)).to(
        tl.int64
    )


@triton.jit
def round_units(nats):
    """Rounds nats of either sign to the nearest unit; NaN becomes 0."""
    units = tl.minimum(tl.maximum(nats * C.PER_NAT, -C.MAX_LOSS), C.MAX_LOSS)
    return tl.floor(tl.where(nats == nats, units, 0.0) + 0.5).to(tl.int64)


@triton.jit
def at(offset, j, values):
    """Returns the element of `values` at offset j."""
    return tl.sum(tl.where(offset == j, values, tl.zeros_like(values)), axis=0)


@triton.jit
def fits_budget(wants, loss, remaining, offset, length):
    """Selects, in order, the positions in `wants` whose loss fits the budget; in units."""
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
    """Loads the budget up to each offset in units, the rule's value, and the tokens left."""
    rate = tl.load(record_ptr + C.COLUMN.RATE)
    # max_lost(rate, tokens) - lost
    tokens = produced.to(tl.int64) + offset + 1
    remaining = (rate * (tokens + C.BURST_TOKENS)) >> C.RATE_SHIFT
    remaining -= tl.load(record_ptr + C.COLUMN.LOST)
    remaining = tl.where(rate == C.NO_BOUND, C.NO_LIMIT, remaining)
    tokens_left = tl.maximum(tl.load(record_ptr + C.COLUMN.MAX_TOKENS) - produced - 1, 0)
    return remaining, tl.load(record_ptr + C.COLUMN.VALUE), tokens_left


@triton.jit
def has_ended(record_ptr, last, produced):
    """Whether the request ended before this step, 1 or 0."""
    stop_ids = tl.load(record_ptr + C.COLUMN.STOP_IDS + tl.arange(0, C.MAX_STOP_IDS))
    is_end = tl.max((stop_ids == last).to(tl.int32), axis=0)
    is_end = tl.where((produced > 0) & (last >= 0), is_end, 0)
    return tl.where(produced >= tl.load(record_ptr + C.COLUMN.MAX_TOKENS), 1, is_end)
