"""What each request allows and has lost, by slot: what `vllm_mars.kernels.terms.Records` holds."""

import math
from typing import NamedTuple

import torch

from vllm_mars.config import MarsConfig
from vllm_mars.kernels.terms import (
    LOSS_BITS,
    MOST_BALANCE,
    RATE_BITS,
    Records,
    loss_rate,
    loss_units,
    most_lost,
    price_units,
)
from vllm_mars.requests import RequestOptions

# A price that follows what is left is c * sqrt(b * left / B), for a bound of b nats per token and a
# burst of B. At this c**2 a request's loss lands on b; found on recorded steps, by how a request is
# verified (docs/results.md).
GREEDY_C2 = 7
SAMPLED_C2 = 10
DRAWN_C2 = 20


class Record(NamedTuple):
    """The record of one request; the fields are those of `Records`."""

    threshold: float
    price: int
    price_scale: int
    rate: int
    lost: int


def new_records(num_slots: int, device: torch.device) -> Records:
    """Records that relax nothing, on a device."""

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_slots, dtype=dtype, device=device)

    integers = (zeros(torch.int64) for _ in Records._fields[1:])
    return Records(zeros(torch.float32), *integers)


def record_of(
    options: RequestOptions,
    config: MarsConfig,
    num_output_tokens: int = 0,
    *,
    is_greedy: bool = True,
    is_drawn: bool = False,
) -> Record:
    """The record of a request that enters the batch.

    Args:
        options: what the request chose.
        config: the server's options.
        num_output_tokens: that it comes with. vLLM does not tell a request that comes back after a
            preemption from a new one, so what these lost is taken to be all that was allowed.
        is_greedy: whether its temperature is 0.
        is_drawn: whether its drafts are drawn from the draft's distribution.
    """
    value = options.value
    rate, burst = loss_rate(options.max_loss), loss_units(config.loss_burst)
    lost = 0
    if num_output_tokens and options.max_loss < math.inf:
        lost = most_lost(rate, burst, num_output_tokens)
    scale = 0
    if value == math.inf:
        c2 = GREEDY_C2 if is_greedy else DRAWN_C2 if is_drawn else SAMPLED_C2
        scale = price_scale(c2, rate, burst)
    # A bound of nothing leaves no scale, and its price is 0.
    price = price_units(value) if config.rule == "price" and value < math.inf else 0
    return Record(value, price, scale, rate, lost)


def price_scale(c2: int, rate: int, burst: int) -> int:
    """What makes isqrt(price_scale * left) the price c * sqrt(b * left / B), in units."""
    scale: int = (c2 * rate << (2 * LOSS_BITS - RATE_BITS)) // max(burst, 1)
    return min(scale, int(MOST_BALANCE))
