"""Forwarding of the workers' reports by the scheduler; in the engine core.

Counts leave with the next scheduler statistics, a request's report rows with the step's tokens. The
step that ends the last request is followed by one without tokens, which brings all remaining
counts. A server reads it like any other; an `LLM` learns from `has_more` to read on.
"""

import dataclasses
from typing import Any

from vllm_mars.options.config import MarsConfig
from vllm_mars.options.requests import in_force, options_of
from vllm_mars.report.carrier import FIELD, EngineReport, StepReport, add_counts, put


def forward_reports(scheduler: Any, config: MarsConfig) -> None:
    """Makes a vLLM scheduler forward counts and reports."""
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    add_request = scheduler.add_request
    schedule = scheduler.schedule
    update_from_output = scheduler.update_from_output
    make_stats = scheduler.make_stats
    speculative_config = scheduler.vllm_config.speculative_config
    counts: list[int] | None = None
    # Steps that are scheduled but have not returned.
    num_in_flight = 0
    # First entries of the reports, by id of the requests that want one.
    asking: dict[str, dict[str, Any]] = {}

    def add_and_note(request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.request_id not in scheduler.requests:
            asking.pop(request.request_id, None)
        result = add_request(request, *args, **kwargs)
        params = request.sampling_params
        # More input for an existing request has its id.
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
        nonlocal num_in_flight
        scheduled = schedule(*args, **kwargs)
        num_in_flight += 1
        return scheduled

    def update_and_take(scheduler_output: Any, model_runner_output: Any) -> Any:
        nonlocal counts, num_in_flight
        num_in_flight -= 1
        report = vars(model_runner_output).pop(FIELD, StepReport())
        if report.counts is not None:
            counts = report.counts if counts is None else add_counts(counts, report.counts)
        # A client's abort removes a request between steps.
        for request_id in [name for name in asking if name not in scheduler.requests]:
            del asking[request_id]
        result = update_from_output(scheduler_output, model_runner_output)
        if asking:
            for core_outputs in result.values():
                for output in core_outputs.outputs:
                    if (head := asking.get(output.request_id)) is not None:
                        send(head, report, output)
        return result

    # vLLM sends metrics only with `--per-request-spec-decode-metrics`, with the last tokens, but an
    # answer that ends with a stop string ends in the front end before that.
    def send(head: dict[str, Any], report: StepReport, output: Any) -> None:
        # A request that has ended is not listed, but its output has metrics, except on errors.
        request = scheduler.requests.get(output.request_id)
        metrics = output.spec_decode_metrics or getattr(request, "spec_decode_metrics", None)
        if metrics is None:
            return
        if output.spec_decode_metrics is None:
            # Lists that grow with the answer are sent only at its end.
            metrics = dataclasses.replace(metrics, per_step_accepted=[], per_step_drafted=[])
        # Tokens after a stop are not part of the answer.
        row = report.rows.get(output.request_id, [])[: len(output.new_token_ids)]
        put(metrics, {"head": head, "row": row})
        output.spec_decode_metrics = metrics

    def make_with_counts(*args: Any, **kwargs: Any) -> Any:
        nonlocal counts
        stats = make_stats(*args, **kwargs)
        # None if statistics are off.
        if stats is not None:
            # `has_requests` is also true while a KV connector keeps an ended request.
            has_more = bool(
                num_in_flight or scheduler.has_unfinished_requests() or scheduler.finished_req_ids
            )
            if counts is not None or has_more:
                put(stats, EngineReport(counts, has_more))
                counts = None
        return stats

    scheduler.add_request = add_and_note
    scheduler.schedule = schedule_and_count
    scheduler.update_from_output = update_and_take
    scheduler.make_stats = make_with_counts
