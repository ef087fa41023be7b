"""The record of a request that enters the batch: see `vllm_mars.kernels.record.Column`."""

import math
from typing import TYPE_CHECKING

from vllm_mars.kernels.ledger.naive import loss_rate, most_lost
from vllm_mars.kernels.record import MOST_ENDS, RECORD_SIZE, Column, held
from vllm_mars.options.config import SCOPES, MarsConfig, price_of_bound
from vllm_mars.options.requests import RequestOptions, ends_of

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def record_of(
    options: RequestOptions,
    params: "SamplingParams",
    config: MarsConfig,
    is_drawn: bool,
    most_tokens: int,
    num_output_tokens: int = 0,
) -> list[int]:
    """The record of a request, without what its tokens make of it.

    Args:
        options: what the request chose.
        params: its parameters.
        config: the server's options.
        is_drawn: whether drafts are drawn where requests sample.
        most_tokens: output tokens that the model's length leaves it.
        num_output_tokens: that it comes with. What these lost is taken to be all that was allowed;
            a caller that knows better writes it.
    """
    rate = loss_rate(options.max_loss)
    record = [0] * RECORD_SIZE
    record[Column.RATE] = rate
    value = options.value
    if value == math.inf:
        value = price_of_bound(options.max_loss, params.temperature, is_drawn)
    record[Column.VALUE] = held(config.rule, value)
    if num_output_tokens and options.max_loss < math.inf:
        record[Column.LOST] = most_lost(rate, num_output_tokens)
    record[Column.MOST_TOKENS] = max(min(most_tokens, params.max_tokens or most_tokens), 0)
    record[Column.SCOPE] = SCOPES.index(options.scope)
    ends = ends_of(params)
    record[Column.ENDS :] = [*ends, *[-1] * (MOST_ENDS - len(ends))]
    return record
