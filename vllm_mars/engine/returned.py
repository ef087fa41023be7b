"""`mars_return`: what verification did to one request, in its answer.

Of a greedy request the relaxed tokens and what each lost; of one that samples `log_ratios`, for
each token log m - log p, where m is the distribution that was served and p the target's, and
vLLM's `draft_sample_method`.

The engine core collects it in vLLM's `RequestSpecDecodeMetrics`, which is given one more field and
which the server puts into a response as `metrics.speculative_decoding`. vLLM fills that only where
`--per-request-spec-decode-metrics` is set; here it is made for each request that asks.
"""

import functools
import math
from typing import Any

from vllm_mars.config import MarsConfig
from vllm_mars.engine.compat import check_interfaces
from vllm_mars.engine.transport import REQUEST_FIELD, declare_field
from vllm_mars.requests import in_force, options_of
from vllm_mars.runner.outputs import RETURNED_FIELD


def declare_request_field(metrics: type) -> None:
    """Gives vLLM's `RequestSpecDecodeMetrics` the field, and its `to_dict` an entry if it is set.

    Args:
        metrics: the class, which `vllm_mars.engine.transport.declare_field` has not seen.
    """
    declare_field(metrics, REQUEST_FIELD, dict[str, Any] | None)
    to_dict = metrics.to_dict  # type: ignore[attr-defined]

    @functools.wraps(to_dict)
    def with_mars(self: Any) -> dict[str, Any]:
        payload: dict[str, Any] = to_dict(self)
        found = getattr(self, REQUEST_FIELD)
        if found is not None:
            payload[REQUEST_FIELD] = found
        return payload

    metrics.to_dict = with_mars  # type: ignore[attr-defined]


def collect_relaxed(scheduler: Any, config: MarsConfig) -> None:
    """Makes a scheduler collect what was relaxed for the requests that ask, if vLLM can return it.

    Args:
        scheduler: vLLM's `Scheduler`, or a subclass of it. Its `add_request` and
            `update_from_output` are wrapped, on this instance alone.
        config: the server's options.
    """
    if not is_supported():
        return
    check_interfaces("return")
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    add_request, update_from_output = scheduler.add_request, scheduler.update_from_output
    speculative_config = scheduler.vllm_config.speculative_config
    longest = speculative_config.num_speculative_tokens
    draft_sample_method = getattr(speculative_config, "draft_sample_method", "greedy")
    asking: set[str] = set()

    def add_and_begin(request: Any, *args: Any, **kwargs: Any) -> Any:
        result = add_request(request, *args, **kwargs)
        params = request.sampling_params
        # A further input of a request that is there already comes under its id.
        request = scheduler.requests.get(request.request_id, request)
        if params is not None and (options := options_of(params, config)).wants_return:
            if request.spec_decode_metrics is None:
                request.spec_decode_metrics = RequestSpecDecodeMetrics.new(longest)
            found: dict[str, Any] = dict(in_force(options, config))
            if params.temperature == 0:
                found |= {"num_relaxed_tokens": 0, "relaxed_positions": [], "loss_nats": []}
            else:
                found |= {"draft_sample_method": draft_sample_method, "log_ratios": []}
            setattr(request.spec_decode_metrics, REQUEST_FIELD, found)
            asking.add(request.request_id)
        return result

    def update_and_collect(scheduler_output: Any, model_runner_output: Any) -> Any:
        rows = vars(model_runner_output).pop(RETURNED_FIELD, None) or {}
        # A request that ends in this step is no longer in the scheduler's list afterwards.
        before = {
            request: request.num_output_tokens
            for request_id in asking
            if (request := scheduler.requests.get(request_id)) is not None
        }
        result = update_from_output(scheduler_output, model_runner_output)
        for request, begin in before.items():
            # What a stop cut off is no part of the answer.
            produced = request.num_output_tokens - begin
            found = getattr(request.spec_decode_metrics, REQUEST_FIELD)
            _add_step(found, begin, rows.get(request.request_id, [])[: max(produced, 0)], produced)
            if request.request_id not in scheduler.requests:
                asking.discard(request.request_id)
        return result

    scheduler.add_request = add_and_begin
    scheduler.update_from_output = update_and_collect


def _add_step(found: dict[str, Any], begin: int, row: list[float], produced: int) -> None:
    """Adds a step's row of the table to what a request gets back."""
    if "log_ratios" in found:
        # Without a draft a token is the target's own.
        rest = [0.0] * (produced - len(row))
        found["log_ratios"] = found["log_ratios"][:begin] + row + rest
        return
    kept = [(offset, lost) for offset, lost in enumerate(row) if not math.isnan(lost)]
    found["relaxed_positions"] += [begin + offset for offset, _ in kept]
    found["loss_nats"] += [lost for _, lost in kept]
    found["num_relaxed_tokens"] += len(kept)


def is_supported() -> bool:
    """Whether this vLLM has a place for it."""
    from vllm.v1.metrics import stats

    return hasattr(stats, "RequestSpecDecodeMetrics")
