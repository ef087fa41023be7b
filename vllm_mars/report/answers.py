"""Reports in answers to requests with `mars_return`; in the server.

A greedy request gets its relaxed tokens and the loss of each. A sampled request gets `log_ratios`,
log m - log p of each token, where m is the served distribution and p the target's, `drift_nats`,
the answer's sum of E_m[-log p] - H(p), and vLLM's `draft_sample_method`.

vLLM's RequestState concatenates the rows of a request's steps, cut to the answer's tokens.
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
# Attribute of RequestState: the report rows of its tokens so far.
_ROW = "_mars_row"


def collect_rows(request_state: type) -> None:
    """Makes vLLM's RequestState collect the report rows of its steps."""

    # vLLM assigns a step's metrics before it counts the step's tokens, and reads them when the
    # answer ends.
    def assign(self: Any, metrics: Any) -> None:
        part = found_on(metrics)
        if part is not None:
            row = vars(self).setdefault(_ROW, [])
            begin = self.detokenizer.num_output_tokens()
            # Tokens without a draft have no row: they are the target's.
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
    """Returns a choice's report: `head`, and `row` (shorter or longer than the answer) as lists."""
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
    """Adds the reports as `metrics.mars` to the response or stream that a wrapped method returns.

    `names` are the method's first parameters, which another plugin's wrapper may hide.
    """
    arguments = dict(zip(names, args, strict=False)) | kwargs
    has_mars = config_of(instance.engine_client.vllm_config) is not None
    xargs = getattr(arguments.get("request"), "vllm_xargs", None) or {}
    if not has_mars or not xargs.get(RETURN):
        return wrapped(*args, **kwargs)
    # By index of the prompt and of the choice.
    reports: dict[tuple[int, int], dict[str, Any]] = {}

    def note(prompt: int, result: Any) -> None:
        for output in result.outputs:
            report = found_on(output.spec_decode_metrics)
            if report is not None:
                reports[prompt, output.index] = report

    async def noted(results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for result in results:
            # Completions come with the index of their prompt.
            prompt, prompt_result = result if isinstance(result, tuple) else (0, result)
            note(prompt, prompt_result)
            yield result

    def in_order() -> list[dict[str, Any]]:
        return [reports[key] for key in sorted(reports)]

    async def with_reports(response: Any) -> Any:
        return _add(await response, in_order())

    async def with_last(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        async for chunk in chunks:
            # The usage chunk carries vLLM's metrics.
            if '"choices":[]' in chunk:
                body = json.loads(chunk.removeprefix("data: "))
                body["metrics"] = {**(body.get("metrics") or {}), FIELD: in_order()}
                chunk = f"data: {json.dumps(body)}\n\n"
            yield chunk

    if "final_res_batch" in arguments:
        for prompt, result in enumerate(arguments["final_res_batch"]):
            note(prompt, result)
        return _add(wrapped(*args, **kwargs), in_order())
    arguments["result_generator"] = noted(arguments["result_generator"])
    positional = [arguments.pop(name) for name in names[: len(args)]]
    result = wrapped(*positional, *args[len(names) :], **arguments)
    return with_last(result) if isinstance(result, AsyncIterator) else with_reports(result)


def _add(response: Any, reports: list[dict[str, Any]]) -> Any:
    from vllm.entrypoints.generate.base.protocol import PerRequestMetrics

    # Error responses have no choices.
    if hasattr(response, "choices"):
        response.metrics = response.metrics or PerRequestMetrics()
        put(response.metrics, reports)
    return response
