"""In the engine core: a scheduler passes on what its workers tell.

Counts go to its next statistics. Of a request that asks for a report its rows go along with the
step's tokens; vLLM sends a request's metrics with the last ones alone, and only where
`--per-request-spec-decode-metrics` is set, but an answer that a stop string ends is over in the
front end first.

Behind the step that ends the last request comes one without tokens, which brings all counts that
are left. A server reads it as it reads all; an `LLM` is told that there is more to read.
"""

import dataclasses
from typing import Any

from vllm_mars.options.config import MarsConfig
from vllm_mars.options.requests import in_force, options_of
from vllm_mars.report.carrier import FIELD, EngineReport, StepReport, add_counts, put


def forward_reports(scheduler: Any, config: MarsConfig) -> None:
    """Makes a scheduler pass on counts and reports.

    Args:
        scheduler: vLLM's `Scheduler`, or a subclass of it. Its `add_request`, `schedule`,
            `update_from_output` and `make_stats` are wrapped, on this instance alone.
        config: the server's options.
    """
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    add_request, schedule = scheduler.add_request, scheduler.schedule
    update_from_output, make_stats = scheduler.update_from_output, scheduler.make_stats
    speculative_config = scheduler.vllm_config.speculative_config
    counts: list[int] | None = None
    # Steps that have been scheduled and not yet come back.
    num_under_way = 0
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
                longest = speculative_config.num_speculative_tokens
                request.spec_decode_metrics = RequestSpecDecodeMetrics.new(longest)
            head: dict[str, Any] = in_force(options, config)
            if params.temperature != 0:
                head["draft_sample_method"] = speculative_config.draft_sample_method
            asking[request.request_id] = head
        return result

    def schedule_and_count(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_under_way
        scheduled = schedule(*args, **kwargs)
        num_under_way += 1
        return scheduled

    def update_and_take(scheduler_output: Any, model_runner_output: Any) -> Any:
        nonlocal counts, num_under_way
        num_under_way -= 1
        report = vars(model_runner_output).pop(FIELD, StepReport())
        if report.counts is not None:
            counts = report.counts if counts is None else add_counts(counts, report.counts)
        # A client's abort takes a request away between the steps.
        for request_id in [it for it in asking if it not in scheduler.requests]:
            del asking[request_id]
        result = update_from_output(scheduler_output, model_runner_output)
        for output in [it for of in result.values() for it in of.outputs] if asking else ():
            if (head := asking.get(output.request_id)) is not None:
                send(head, report, output)
        return result

    def send(head: dict[str, Any], report: StepReport, output: Any) -> None:
        # A request that ends is no longer listed: vLLM sends its metrics, but with no error.
        request = scheduler.requests.get(output.request_id)
        metrics = output.spec_decode_metrics or getattr(request, "spec_decode_metrics", None)
        if metrics is None:
            return
        if output.spec_decode_metrics is None:
            # What grows with the answer comes at its end.
            metrics = dataclasses.replace(metrics, per_step_accepted=[], per_step_drafted=[])
        # What a stop cut off is no part of the answer.
        row = report.rows.get(output.request_id, [])[: len(output.new_token_ids)]
        put(metrics, {"head": head, "row": row})
        output.spec_decode_metrics = metrics

    def make_with_counts(*args: Any, **kwargs: Any) -> Any:
        nonlocal counts
        stats = make_stats(*args, **kwargs)
        # None where statistics are off.
        if stats is not None:
            has_more = bool(num_under_way or scheduler.has_requests())
            if counts is not None or has_more:
                put(stats, EngineReport(counts, has_more))
                counts = None
        return stats

    scheduler.add_request = add_and_note
    scheduler.schedule = schedule_and_count
    scheduler.update_from_output = update_and_take
    scheduler.make_stats = make_with_counts
