"""`mars_return`: what verification did to each choice of an answer.

Of a greedy request the relaxed tokens and what each lost; of one that samples `log_ratios`, for
each token log m - log p, where m is the distribution that was served and p the target's,
`drift_nats`, the answer's sum of E_m[-log p] - H(p), and vLLM's `draft_sample_method`.

    worker        a step's row for each request that asks: `runner.outputs`
    engine core   sends the row along with the step's tokens, in vLLM's RequestSpecDecodeMetrics
    front end     vLLM's RequestState puts the rows together, and cuts them to the answer's tokens
    server        `metrics.mars` lists the reports of all choices

vLLM sends its metrics with the last tokens, and only where `--per-request-spec-decode-metrics` is
set. But an answer that a stop string ends is over in the front end first.
"""

import dataclasses
import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from vllm_mars.options.config import MarsConfig, config_of
from vllm_mars.options.requests import RETURN, in_force, options_of
from vllm_mars.report.outputs import RETURNED_FIELD
from vllm_mars.report.transport import REQUEST_FIELD

_METRICS = "spec_decode_metrics"
# Of a RequestState: what the requests' steps did to its tokens so far.
_ROW = "_mars_row"


def send_rows(scheduler: Any, config: MarsConfig) -> None:
    """Makes a scheduler send what each step did along with its tokens, to the requests that ask.

    Args:
        scheduler: vLLM's `Scheduler`, or a subclass of it. Its `add_request` and
            `update_from_output` are wrapped, on this instance alone.
        config: the server's options.
    """
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    add_request, update_from_output = scheduler.add_request, scheduler.update_from_output
    speculative_config = scheduler.vllm_config.speculative_config
    longest = speculative_config.num_speculative_tokens
    method = getattr(speculative_config, "draft_sample_method", "greedy")
    # What a report begins with, by the ids of the scheduler's requests that ask for one.
    asking: dict[str, dict[str, Any]] = {}

    def add_and_note(request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.request_id not in scheduler.requests:
            asking.pop(request.request_id, None)
        result = add_request(request, *args, **kwargs)
        params = request.sampling_params
        # A further input of a request that is there already comes under its id.
        request = scheduler.requests.get(request.request_id, request)
        if params is not None and (options := options_of(params, config)).wants_return:
            if request.spec_decode_metrics is None:
                request.spec_decode_metrics = RequestSpecDecodeMetrics.new(longest)
            samples = {"draft_sample_method": method} if params.temperature != 0 else {}
            asking[request.request_id] = in_force(options, config) | samples
        return result

    def update_and_send(scheduler_output: Any, model_runner_output: Any) -> Any:
        rows = vars(model_runner_output).pop(RETURNED_FIELD, None) or {}
        # A client's abort takes a request away between the steps.
        for request_id in [it for it in asking if it not in scheduler.requests]:
            del asking[request_id]
        result = update_from_output(scheduler_output, model_runner_output)
        outputs = [output for of in result.values() for output in of.outputs] if asking else ()
        for output in outputs:
            if (head := asking.get(output.request_id)) is None:
                continue
            # A request that ends is no longer listed: vLLM sends its metrics, but with no error.
            request = scheduler.requests.get(output.request_id)
            metrics = output.spec_decode_metrics or getattr(request, _METRICS, None)
            if metrics is None:
                continue
            if output.spec_decode_metrics is None:
                # What grows with the answer comes at its end.
                metrics = dataclasses.replace(metrics, per_step_accepted=[], per_step_drafted=[])
            # What a stop cut off is no part of the answer.
            row = rows.get(output.request_id, [])[: len(output.new_token_ids)]
            setattr(metrics, REQUEST_FIELD, {"head": head, "row": row})
            output.spec_decode_metrics = metrics
        return result

    scheduler.add_request = add_and_note
    scheduler.update_from_output = update_and_send


def collect_rows(request_state: type) -> None:
    """Makes vLLM's RequestState, the front end's record of a request, collect the steps' rows.

    vLLM assigns the metrics of a step to `spec_decode_metrics` before it counts the step's tokens,
    and reads them when the answer ends; both go through a property then.
    """

    def assign(self: Any, metrics: Any) -> None:
        part = getattr(metrics, REQUEST_FIELD, None)
        if part is not None:
            row, begin = vars(self).setdefault(_ROW, []), self.detokenizer.num_output_tokens()
            # Without a draft there is no row, and a token is the target's own.
            row[begin:] = [(math.nan, 0.0)] * (begin - len(row)) + part["row"]
        vars(self)[_METRICS] = metrics

    def read(self: Any) -> Any:
        metrics = vars(self).get(_METRICS)
        part = getattr(metrics, REQUEST_FIELD, None)
        if part is None:
            return metrics
        metrics = dataclasses.replace(metrics)
        told = _report(part["head"], vars(self)[_ROW], self.detokenizer.num_output_tokens())
        setattr(metrics, REQUEST_FIELD, told)
        return metrics

    setattr(request_state, _METRICS, property(read, assign))


def _report(
    head: dict[str, Any], row: Sequence[tuple[float, float]], length: int
) -> dict[str, Any]:
    """What a client gets.

    Args:
        head: what it begins with.
        row: of each token, what the table of `Account` holds; it may end early, or reach behind the
            answer.
        length: of the answer, in tokens.
    """
    row = row[:length]
    known = [(place, value) for place, (value, _) in enumerate(row) if not math.isnan(value)]
    if "draft_sample_method" in head:
        ratios = [0.0] * length
        for place, value in known:
            ratios[place] = value
        return head | {"log_ratios": ratios, "drift_nats": sum(drift for _, drift in row)}
    return head | {
        "num_relaxed_tokens": len(known),
        "relaxed_positions": [place for place, _ in known],
        "loss_nats": [value for _, value in known],
    }


def tell(names: Sequence[str], wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps a method that makes a response or its stream, to add the reports as `metrics.mars`.

    Args:
        names: of the method's first parameters; another plugin's wrapper may hide them.
        wrapped, instance, args, kwargs: of the call.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    has_mars = config_of(instance.engine_client.vllm_config) is not None
    if not has_mars or not _wants_return(given.get("request")):
        return wrapped(*args, **kwargs)
    # By the number of the prompt and that of the choice.
    reports: dict[tuple[int, int], dict[str, Any]] = {}

    def note(prompt: int, result: Any) -> None:
        for output in result.outputs:
            told = getattr(output.spec_decode_metrics, REQUEST_FIELD, None)
            if told is not None:
                reports[prompt, output.index] = told

    async def noted(results: AsyncIterator[Any], prompt: int = 0) -> AsyncIterator[Any]:
        async for result in results:
            # Those of several prompts may come with the number of theirs.
            note(*(result if isinstance(result, tuple) else (prompt, result)))
            yield result

    def in_order() -> list[dict[str, Any]]:
        return [reports[key] for key in sorted(reports)]

    async def with_reports(response: Any) -> Any:
        return _add(await response, in_order())

    async def with_last(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        async for chunk in chunks:
            # That of the usage, which vLLM's metrics come with.
            if '"choices":[]' in chunk:
                body = json.loads(chunk.removeprefix("data: "))
                body["metrics"] = {**(body.get("metrics") or {}), REQUEST_FIELD: in_order()}
                chunk = f"data: {json.dumps(body)}\n\n"
            yield chunk

    if "final_res_batch" in given:
        for prompt, result in enumerate(given["final_res_batch"]):
            note(prompt, result)
        return _add(wrapped(*args, **kwargs), in_order())
    if "generators" in given:
        each = enumerate(given["generators"])
        given["generators"] = [noted(results, prompt) for prompt, results in each]
    else:
        given["result_generator"] = noted(given["result_generator"])
    by_place = [given.pop(name) for name in names[: len(args)]]
    result = wrapped(*by_place, *args[len(names) :], **given)
    return with_last(result) if isinstance(result, AsyncIterator) else with_reports(result)


def _wants_return(request: Any) -> bool:
    """Whether a client's request asks; that of /inference/v1/generate has its own parameters."""
    if hasattr(request, "vllm_xargs"):
        own = request.vllm_xargs
    else:
        own = getattr(getattr(request, "sampling_params", None), "extra_args", None)
    return bool((own or {}).get(RETURN))


def _add(response: Any, reports: list[dict[str, Any]]) -> Any:
    from vllm.entrypoints.generate.base.protocol import PerRequestMetrics

    # An error has no choices.
    if hasattr(response, "choices"):
        response.metrics = response.metrics or PerRequestMetrics()
        setattr(response.metrics, REQUEST_FIELD, reports)
    return response
