"""In the server: what verification did to each choice of an answer, for a request's `mars_return`.

Of a greedy request the relaxed tokens and what each lost; of one that samples `log_ratios`, for
each token log m - log p, where m is the distribution that was served and p the target's,
`drift_nats`, the answer's sum of E_m[-log p] - H(p), and vLLM's `draft_sample_method`.

vLLM's RequestState puts the rows of a request's steps together, cut to the answer's tokens;
`metrics.mars` of a response lists the reports of all choices.
"""

import dataclasses
import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from vllm_mars.options.config import config_of
from vllm_mars.options.requests import RETURN
from vllm_mars.report.carrier import FIELD, Rows, found_on, put

_METRICS = "spec_decode_metrics"
# Of a RequestState: what the requests' steps did to its tokens so far.
_ROW = "_mars_row"


def collect_rows(request_state: type) -> None:
    """Makes vLLM's RequestState, the front end's record of a request, collect the steps' rows.

    vLLM assigns the metrics of a step to `spec_decode_metrics` before it counts the step's tokens,
    and reads them when the answer ends; both go through a property then.
    """

    def assign(self: Any, metrics: Any) -> None:
        part = found_on(metrics)
        if part is not None:
            row, begin = vars(self).setdefault(_ROW, []), self.detokenizer.num_output_tokens()
            # Without a draft there is no row, and a token is the target's own.
            row[begin:] = [(math.nan, 0.0)] * (begin - len(row)) + part["row"]
        vars(self)[_METRICS] = metrics

    def read(self: Any) -> Any:
        metrics = vars(self).get(_METRICS)
        part = found_on(metrics)
        if part is None:
            return metrics
        metrics = dataclasses.replace(metrics)
        report = _report(part["head"], vars(self)[_ROW], self.detokenizer.num_output_tokens())
        put(metrics, report)
        return metrics

    setattr(request_state, _METRICS, property(read, assign))


def _report(head: dict[str, Any], row: Rows, length: int) -> dict[str, Any]:
    """What a client gets.

    Args:
        head: what it begins with.
        row: of each token, what the table of `StepCounters` holds; it may end early, or reach
            behind the answer.
        length: of the answer, in tokens.
    """
    row = row[:length]
    known = [(position, value) for position, (value, _) in enumerate(row) if not math.isnan(value)]
    if "draft_sample_method" in head:
        ratios = [0.0] * length
        for position, value in known:
            ratios[position] = value
        return head | {"log_ratios": ratios, "drift_nats": sum(drift for _, drift in row)}
    return head | {
        "num_relaxed_tokens": len(known),
        "relaxed_positions": [position for position, _ in known],
        "loss_nats": [value for _, value in known],
    }


def attach_reports(
    names: Sequence[str], wrapped: Any, instance: Any, args: Any, kwargs: Any
) -> Any:
    """Wraps a method that makes a response or its stream, to add the reports as `metrics.mars`.

    Args:
        names: of the method's first parameters; another plugin's wrapper may hide them.
        wrapped, instance, args, kwargs: of the call.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    has_mars = config_of(instance.engine_client.vllm_config) is not None
    asked = getattr(given.get("request"), "vllm_xargs", None) or {}
    if not has_mars or not asked.get(RETURN):
        return wrapped(*args, **kwargs)
    # By the number of the prompt and that of the choice.
    reports: dict[tuple[int, int], dict[str, Any]] = {}

    def note(prompt: int, result: Any) -> None:
        for output in result.outputs:
            report = found_on(output.spec_decode_metrics)
            if report is not None:
                reports[prompt, output.index] = report

    async def noted(results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for result in results:
            # Those of completions come with the number of their prompt.
            note(*(result if isinstance(result, tuple) else (0, result)))
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
                body["metrics"] = {**(body.get("metrics") or {}), FIELD: in_order()}
                chunk = f"data: {json.dumps(body)}\n\n"
            yield chunk

    if "final_res_batch" in given:
        for prompt, result in enumerate(given["final_res_batch"]):
            note(prompt, result)
        return _add(wrapped(*args, **kwargs), in_order())
    given["result_generator"] = noted(given["result_generator"])
    by_place = [given.pop(name) for name in names[: len(args)]]
    result = wrapped(*by_place, *args[len(names) :], **given)
    return with_last(result) if isinstance(result, AsyncIterator) else with_reports(result)


def _add(response: Any, reports: list[dict[str, Any]]) -> Any:
    from vllm.entrypoints.generate.base.protocol import PerRequestMetrics

    # An error has no choices.
    if hasattr(response, "choices"):
        response.metrics = response.metrics or PerRequestMetrics()
        put(response.metrics, reports)
    return response
