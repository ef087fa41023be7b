"""Attaches a step's counts and report rows to its output; in a worker."""

import copy
from typing import Any, NamedTuple

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_mars.kernels.interface import StepCounters
from vllm_mars.report.carrier import Rows, StepReport, put
from vllm_mars.report.counters import Counters


class _RequestedTable(NamedTuple):
    """Table of a step, for the requests that want a report."""

    # By index in the batch.
    request_ids: dict[int, str]
    # float32 [batch, 2, width]: see `StepCounters`.
    table: torch.Tensor
    # On the host, with the event after the copy; None if `table` is read instead.
    copy: tuple[torch.Tensor, torch.Event] | None = None

    def rows(self) -> dict[str, Rows]:
        """Returns the rows of each request after waiting for the copy."""
        table = self.table
        if self.copy is not None:
            table, event = self.copy
            event.synchronize()
        return {name: table[req_idx].T.tolist() for req_idx, name in self.request_ids.items()}


class StepReports:
    """Collects the counts and reports of an engine's steps and attaches them to outputs.

    `keeps_table` gives every step a table, even if no request wants a report.
    """

    def __init__(self, counters: Counters, keeps_table: bool = False) -> None:
        self.counters = counters
        # Tables of the current step for the requests that want a report.
        self.requested_tables: list[_RequestedTable] = []
        self.num_speculative_tokens = counters.layout.num_speculative_tokens
        self._keeps_table = keeps_table
        # Set if the outputs of this rank are read.
        self._runner: Any = None

    def step_counters(
        self, batch: int, device: torch.device, requested: dict[int, str]
    ) -> StepCounters:
        """Returns a step's buffers; `requested` maps batch indices to ids that want a report."""
        table = None
        if requested or self._keeps_table:
            table = torch.empty((batch, 2, self.num_speculative_tokens + 1), device=device)
        if table is not None and requested:
            self.requested_tables.append(_RequestedTable(requested, table))
        return StepCounters(self.counters.device_counts, table)

    def attach_to_runner(self, runner: Any) -> None:
        """Attaches counts and reports to the outputs of vLLM's V1 or V2 `GPUModelRunner`.

        All counts that remain leave in the step without tokens by which vLLM ends the last request.
        Outputs of a rank that nobody reads are unchanged.
        """
        if is_read := _is_read(runner):
            self._runner = runner
        execute_model = runner.execute_model
        sample_tokens = runner.sample_tokens
        has_begun = has_news = False

        def execute_and_flush(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_news
            output = execute_model(*args, **kwargs)
            # While requests are left, an empty step is a poll or a bubble and must not wait.
            if not is_read or not has_news or _has_requests(runner):
                return output
            has_news = False
            return self._with_all_counts(output)

        def sample_and_report(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_begun, has_news
            # Drops counts from vLLM's memory profiling. Those of V2's warm-up requests leave with
            # outputs that are discarded, because the warm-up also ends in a step without tokens.
            if not has_begun:
                has_begun = True
                self.counters.take_delta(flush=True)
            self.requested_tables.clear()
            output = sample_tokens(*args, **kwargs)
            has_news = True
            if is_read and (carrier := carrier_of(output)) is not None:
                self._report(output, carrier)
            return output

        runner.execute_model = execute_and_flush
        runner.sample_tokens = sample_and_report

    def copy_to_host(self) -> None:
        """Starts the copies of the last verification's tables to the host, on V2."""
        if not self.requested_tables or self._runner is None:
            return
        from vllm.v1.worker.gpu.async_utils import stream

        for index, requested in enumerate(self.requested_tables):
            table = requested.table
            if requested.copy is not None or table.device.type == "cpu":
                continue
            copy_stream = self._runner.output_copy_stream
            main_stream = self._runner.main_stream
            rows = torch.empty_like(table, device="cpu", pin_memory=True)
            # Enqueued before the drafter: a step's tokens do not wait for its next drafts.
            with stream(copy_stream, main_stream):
                copy_stream.wait_stream(main_stream)
                rows.copy_(table, non_blocking=True)
                event = torch.Event(table.device)
                event.record(copy_stream)
            self.requested_tables[index] = requested._replace(copy=(rows, event))

    def _report(self, output: Any, carrier: ModelRunnerOutput) -> None:
        counts = self.counters.take_delta()
        tables = list(self.requested_tables)
        if counts is None and not tables:
            return

        def report() -> StepReport:
            rows: dict[str, Rows] = {}
            for table in tables:
                rows.update(table.rows())
            return StepReport(counts, rows)

        if all(table.copy is None for table in tables) or not hasattr(output, "get_output"):
            put(carrier, report())
            return
        # An asynchronous output waits for the copies in `get_output`.
        get_output = output.get_output

        def get_and_report() -> Any:
            result = get_output()
            put(carrier_of(result), report())
            return result

        output.get_output = get_and_report

    def _with_all_counts(self, output: Any) -> Any:
        """Adds all remaining counts to what `execute_model` returned for an empty step."""
        if not isinstance(output, ModelRunnerOutput) or output.req_ids:
            return output
        # No request is left that would wait for the device.
        counts = self.counters.take_delta(flush=True)
        if counts is None:
            return output
        # All empty steps share one output object.
        output = copy.copy(output)
        put(output, StepReport(counts))
        return output


def _is_read(runner: Any) -> bool:
    """Whether a rank's outputs are read: the first's, or all if each is an engine (torchrun)."""
    from vllm.distributed import get_tensor_model_parallel_rank

    backend = runner.vllm_config.parallel_config.distributed_executor_backend
    is_first: bool = get_tensor_model_parallel_rank() == 0
    return is_first or backend == "external_launcher"


def _has_requests(runner: Any) -> bool:
    """Whether a V1 or V2 runner still has requests."""
    states = getattr(runner, "req_states", None)
    return bool(runner.requests if states is None else states.req_id_to_index)


def carrier_of(output: Any) -> ModelRunnerOutput | None:
    """Returns the ModelRunnerOutput that a result of `sample_tokens` is or becomes, or None."""
    if isinstance(output, AsyncModelRunnerOutput):
        # Asynchronous scheduling: `get_output` fills in and returns this attribute on V1 or V2.
        for name in ("_model_runner_output", "model_runner_output"):
            if (inner := getattr(output, name, None)) is not None:
                output = inner
    # All empty steps share one output object, which must not change.
    if isinstance(output, ModelRunnerOutput) and output is not EMPTY_MODEL_RUNNER_OUTPUT:
        return output
    return None
