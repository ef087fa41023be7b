"""Record of a request that enters the batch: see `vllm_mars.kernels.interface.Column`."""

import math
from typing import TYPE_CHECKING

from vllm_mars.kernels.budget import loss_rate, max_lost
from vllm_mars.kernels.interface import MAX_STOP_IDS, RECORD_SIZE, Column, encode_value
from vllm_mars.options.config import SCOPES, MarsConfig, price_of_bound
from vllm_mars.options.requests import RequestOptions, ends_of

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def record_of(
    options: RequestOptions,
    params: "SamplingParams",
    config: MarsConfig,
    # Whether sampled requests have probabilistic drafts.
    is_probabilistic: bool,
    # Output tokens left by the model's maximum length.
    max_output_tokens: int,
    # Output tokens that the request already has.
    num_output_tokens: int = 0,
) -> list[int]:
    """Builds a request's record, except the columns that depend on its tokens."""
    rate = loss_rate(options.max_loss)
    record = [0] * RECORD_SIZE
    record[Column.RATE] = rate
    value = options.value
    if value == math.inf:
        value = price_of_bound(options.max_loss, params.temperature, is_probabilistic)
    record[Column.VALUE] = encode_value(config.rule, value)
    if num_output_tokens and options.max_loss < math.inf:
        # Assumes that these tokens used the whole budget; callers that know the loss overwrite it.
        record[Column.LOST] = max_lost(rate, num_output_tokens)
    record[Column.MAX_TOKENS] = max(
        min(max_output_tokens, params.max_tokens or max_output_tokens), 0
    )
    record[Column.SCOPE] = SCOPES.index(options.scope)
    stop_ids = ends_of(params)
    record[Column.STOP_IDS :] = [*stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids))]
    return record
