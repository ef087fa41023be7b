"""The record of a request that enters the batch: see `vllm_mars.kernels.terms.Column`."""

import math
from typing import TYPE_CHECKING

from vllm_mars.config import MOST_ENDS, SCOPES, STRICT_VALUE, MarsConfig
from vllm_mars.kernels.terms import (
    FOLLOWS,
    RECORD_SIZE,
    Column,
    float_bits,
    loss_rate,
    most_lost,
    price_units,
)
from vllm_mars.requests import ends_of, options_of

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def record_of(
    params: "SamplingParams", config: MarsConfig, most_tokens: int, num_output_tokens: int = 0
) -> list[int]:
    """The record of a request, without what its tokens make of it.

    Args:
        params: the request's; what it chose among them.
        config: the server's options.
        most_tokens: output tokens that the model's length leaves it.
        num_output_tokens: that it comes with. What these lost is taken to be all that was allowed;
            a caller that knows better writes it.
    """
    options = options_of(params, config)
    rate, is_strict = loss_rate(options.max_loss), options.value == STRICT_VALUE[config.rule]
    record = [0] * RECORD_SIZE
    record[Column.RATE] = rate
    if config.rule == "price":
        record[Column.PRICE] = FOLLOWS if options.value == math.inf else price_units(options.value)
    record[Column.THRESHOLD] = float_bits(1.0 if config.rule == "price" else options.value)
    if num_output_tokens and options.max_loss < math.inf:
        record[Column.LOST] = most_lost(rate, num_output_tokens)
    record[Column.MOST_TOKENS] = max(min(most_tokens, params.max_tokens or most_tokens), 0)
    # What is strict has no use for a colder draft.
    record[Column.DRAFT_SHARE] = float_bits(1.0 if is_strict else config.draft_share)
    record[Column.SCOPE] = SCOPES.index(options.scope)
    ends = ends_of(params)
    record[Column.ENDS :] = [*ends, *[-1] * (MOST_ENDS - len(ends))]
    return record
