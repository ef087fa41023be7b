"""What a request may lose, in units in which every backend agrees: in plain Python."""

import math
from typing import NamedTuple

import numpy as np

# Losses and prices are integers in units of 2**-LOSS_BITS nats, so that every backend agrees:
# losses rounded up, prices down.
LOSS_BITS = 16
# Also of gained acceptance.
UNIT = 2.0**-LOSS_BITS
# What an output token adds to a request's allowance is an integer in units of 2**-RATE_BITS nats.
RATE_BITS = 30
# The largest loss of one position, and the largest price, in units: 16,384 and 8,192 nats.
MAX_LOSS = 1 << 30
MAX_PRICE_UNITS = 1 << 29
# With a bound of b nats per token an answer of n tokens loses at most b (n + BURST_TOKENS).
BURST_TOKENS = 100
# The rate of a request without a bound, and what it may lose.
NO_BOUND = 1 << 40
NO_LIMIT = 1 << 61


class LossBudget(NamedTuple):
    """What one request may pay and lose in this step; integers.

    Attributes:
        value: of the rule, as the record holds it; 0 is strict.
        rate: what an output token adds, in units of 2**-RATE_BITS nats.
        produced: output tokens before this step.
        lost: what the request has lost, in units of 2**-LOSS_BITS nats.
        tokens_left: output tokens that may still come behind the step's first one.
        has_ended: whether the request had ended before this step, of which nothing is counted then.
    """

    value: int
    rate: int
    produced: int
    lost: int
    tokens_left: int
    has_ended: bool = False

    @classmethod
    def of(cls, value: int, rate: int, lost: int, produced: int, most_tokens: int) -> "LossBudget":
        """That of a request's record; whether the last token has ended it is not looked at."""
        tokens_left = max(most_tokens - produced - 1, 0)
        return cls(value, rate, produced, lost, tokens_left, produced >= most_tokens)

    def at(self, offset: int) -> int:
        """What the step's tokens up to this offset may lose."""
        return max_lost(self.rate, self.produced + offset + 1) - self.lost


def ceil_units(nats: float) -> int:
    """Nats in units of 2**-LOSS_BITS, rounded up, at most MAX_LOSS."""
    return min(math.ceil(nats / UNIT), MAX_LOSS)


def round_units(nats: float) -> int:
    """Nats of either sign in those units, rounded to the nearest, at most MAX_LOSS."""
    return round(min(max(nats / UNIT, -MAX_LOSS), MAX_LOSS))


def loss_rate(nats_per_token: float) -> int:
    """What an output token adds to a request's allowance, in units of 2**-RATE_BITS, rounded down.

    Infinity is `NO_BOUND`, and any number less.
    """
    if nats_per_token == math.inf:
        return NO_BOUND
    return min(_units(nats_per_token, RATE_BITS, NO_BOUND), NO_BOUND - 1)


def max_lost(rate: int, num_output_tokens: int) -> int:
    """What so many output tokens may lose, in units of 2**-LOSS_BITS nats."""
    if rate == NO_BOUND:
        return NO_LIMIT
    return rate * (num_output_tokens + BURST_TOKENS) >> (RATE_BITS - LOSS_BITS)


def floor_units(nats: float) -> int:
    """Nats in units of 2**-LOSS_BITS, rounded down, at most MAX_LOSS."""
    return _units(nats, LOSS_BITS, MAX_LOSS)


def price_units(price: float) -> int:
    """A price, in float32, in units of 2**-LOSS_BITS nats, rounded down."""
    return floor_units(float(np.float32(min(max(0.0, price), MAX_PRICE_UNITS / 2**LOSS_BITS))))


def _units(nats: float, bits: int, largest: int) -> int:
    """Nats in units of 2**-bits, rounded down to one in [0, most]; 0 where they are no number."""
    # In this order, in which a NaN gives way to 0 and an integer of any size is only compared.
    return math.floor(min(max(0.0, nats), largest / 2.0**bits) * 2.0**bits)
