"""Loss budget of a request, in integer units so that all backends agree."""

import math
from typing import NamedTuple

import numpy as np

# Losses (rounded up) and prices (rounded down) are integers in units of 2**-LOSS_BITS nats.
LOSS_BITS = 16
# The same unit, 2**-LOSS_BITS, measures gained acceptance.
UNIT = 2.0**-LOSS_BITS
# Rates, the budget per output token, are integers in units of 2**-RATE_BITS nats.
RATE_BITS = 30
# Largest loss of one position and largest price, in units: 16,384 and 8,192 nats.
MAX_LOSS = 1 << 30
MAX_PRICE_UNITS = 1 << 29
# With a bound of b nats per token, an answer of n tokens loses at most b * (n + BURST_TOKENS).
BURST_TOKENS = 100
# Rate and budget of a request without a bound.
NO_BOUND = 1 << 40
NO_LIMIT = 1 << 61


class LossBudget(NamedTuple):
    # The rule's value as encoded in the record; 0 is strict.
    value: int
    # Budget per output token, in units of 2**-RATE_BITS nats.
    rate: int
    # Output tokens before this step.
    produced: int
    # Loss before this step, in units of 2**-LOSS_BITS nats.
    lost: int
    # Output tokens allowed after the first one of this step.
    tokens_left: int
    # Whether the request ended before this step; if so, the step is not counted.
    has_ended: bool = False

    def at(self, offset: int) -> int:
        """Units that the step's tokens up to and including this offset may lose."""
        return max_lost(self.rate, self.produced + offset + 1) - self.lost


def ceil_units(nats: float) -> int:
    """Rounds nats up to units of 2**-LOSS_BITS, at most MAX_LOSS."""
    return min(math.ceil(nats / UNIT), MAX_LOSS)


def round_units(nats: float) -> int:
    """Rounds nats of either sign to the nearest unit, clamped to +-MAX_LOSS."""
    return round(min(max(nats / UNIT, -MAX_LOSS), MAX_LOSS))


def loss_rate(nats_per_token: float) -> int:
    """Rounds a bound down to units of 2**-RATE_BITS; only infinity becomes `NO_BOUND`."""
    if nats_per_token == math.inf:
        return NO_BOUND
    return min(_units(nats_per_token, RATE_BITS, NO_BOUND), NO_BOUND - 1)


def max_lost(rate: int, num_output_tokens: int) -> int:
    """Units that an answer of this length may lose."""
    if rate == NO_BOUND:
        return NO_LIMIT
    return rate * (num_output_tokens + BURST_TOKENS) >> (RATE_BITS - LOSS_BITS)


def floor_units(nats: float) -> int:
    """Rounds nats down to units of 2**-LOSS_BITS, at most MAX_LOSS."""
    return _units(nats, LOSS_BITS, MAX_LOSS)


def price_units(price: float) -> int:
    """Rounds a price, as float32, down to units of 2**-LOSS_BITS, at most MAX_PRICE_UNITS."""
    return floor_units(float(np.float32(min(max(0.0, price), MAX_PRICE_UNITS / 2**LOSS_BITS))))


def _units(nats: float, bits: int, largest: int) -> int:
    """Rounds nats down to units of 2**-bits, clamped to [0, largest]; NaN becomes 0."""
    # max(0.0, nan) is 0.0, but max(nan, 0.0) is nan. An int too large for a float is only compared.
    return math.floor(min(max(0.0, nats), largest / 2.0**bits) * 2.0**bits)
