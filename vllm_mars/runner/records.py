"""What each request allows and has lost, by slot: what `vllm_mars.kernels.terms.Records` holds."""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_mars.config import STRICT_VALUE, MarsConfig
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
from vllm_mars.requests import MOST_ENDS, ends_of, options_of

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

# A price that follows what is left is c * sqrt(b * left / B), for a bound of b nats per token and a
# burst of B. At this c**2 a request's loss lands on b; found on recorded steps, by how a request is
# verified (docs/results.md). Where drafts are drawn the kernels count it `DRAWN_SCALE` times.
GREEDY_C2 = 7
SAMPLED_C2 = 10


class Record(NamedTuple):
    """The record of one request; the fields are those of `Records`."""

    threshold: float
    price: int
    price_scale: int
    rate: int
    lost: int
    most_tokens: int
    ends: list[int]
    draft_share: float


def new_records(num_slots: int, device: torch.device) -> Records:
    """Records that relax nothing, on a device."""

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_slots, dtype=dtype, device=device)

    integers = (zeros(torch.int64) for _ in range(4))
    ends = torch.full((num_slots, MOST_ENDS), -1, dtype=torch.int32, device=device)
    return Records(
        zeros(torch.float32), *integers, zeros(torch.int32), ends, zeros(torch.float32) + 1
    )


def record_of(
    params: "SamplingParams", config: MarsConfig, most_tokens: int, num_output_tokens: int = 0
) -> Record:
    """The record of a request that enters the batch.

    Args:
        params: the request's; what it chose among them.
        config: the server's options.
        most_tokens: output tokens that the model's length leaves it.
        num_output_tokens: that it comes with. What these lost is taken to be all that was allowed;
            a caller that knows better writes it.
    """
    options = options_of(params, config)
    rate, burst = loss_rate(options.max_loss), loss_units(config.loss_burst)
    lost = 0
    if num_output_tokens and options.max_loss < math.inf:
        lost = most_lost(rate, burst, num_output_tokens)
    scale = 0
    if options.value == math.inf:
        scale = price_scale(SAMPLED_C2 if params.temperature else GREEDY_C2, rate, burst)
    is_price = config.rule == "price"
    price = price_units(options.value) if is_price and options.value < math.inf else 0
    threshold = 0.0 if is_price else options.value
    most_tokens = min(most_tokens, params.max_tokens or most_tokens)
    ends = ends_of(params)
    padded = [*ends, *[-1] * (MOST_ENDS - len(ends))]
    own = threshold, price, scale, rate, lost, max(most_tokens, 0)
    is_strict = options.is_structured or options.value == STRICT_VALUE[config.rule]
    return Record(*own, padded, 1.0 if is_strict else config.draft_share)


def price_scale(c2: int, rate: int, burst: int) -> int:
    """What makes isqrt(price_scale * left) the price c * sqrt(b * left / B), in units."""
    scale: int = (c2 * rate << (2 * LOSS_BITS - RATE_BITS)) // max(burst, 1)
    return min(scale, int(MOST_BALANCE))
