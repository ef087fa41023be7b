"""In a worker: what a step did leaves with its output, counts and what requests ask to be told."""

import copy
from typing import Any, NamedTuple

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_mars.kernels.interface import StepCounters
from vllm_mars.report.carrier import Rows, StepReport, put
from vllm_mars.report.counters import Counters


class _Asked(NamedTuple):
    """A table of a step, for the requests that ask.

    Attributes:
        request_ids: ids of these requests by their place in the batch.
        table: float32 `[batch, 2, width]`: see `StepCounters`.
        copy: on its way to the host, and the event behind it; None where the table is there.
    """

    request_ids: dict[int, str]
    table: torch.Tensor
    copy: tuple[torch.Tensor, torch.Event] | None = None

    def rows(self) -> dict[str, Rows]:
        """What it holds of each request; a copy is waited for."""
        table = self.table
        if self.copy is not None:
            table, event = self.copy
            event.synchronize()
        return {name: table[req_idx].T.tolist() for req_idx, name in self.request_ids.items()}


class StepReports:
    """Where the steps of one engine are written down, and how that leaves the worker.

    Args:
        counters: of the engine.
        keeps_table: whether each step has a table, whoever asks.

    Attributes:
        asked: tables of the step that is under way, for the requests that ask.
        num_speculative_tokens: K, the longest draft of the engine.
    """

    def __init__(self, counters: Counters, keeps_table: bool = False) -> None:
        self.counters = counters
        self.asked: list[_Asked] = []
        self.num_speculative_tokens = counters.layout.num_speculative_tokens
        self._keeps_table = keeps_table
        # Whose outputs somebody reads.
        self._runner: Any = None

    def step_counters(
        self, batch: int, device: torch.device, asking: dict[int, str]
    ) -> StepCounters:
        """Where a step is written down.

        Args:
            batch: its requests.
            device: of the step.
            asking: ids of those that ask for a report, by place.
        """
        table = None
        if asking or self._keeps_table:
            table = torch.empty((batch, 2, self.num_speculative_tokens + 1), device=device)
        if table is not None and asking:
            self.asked.append(_Asked(asking, table))
        return StepCounters(self.counters.device_counts, table)

    def attach_to_runner(self, runner: Any) -> None:
        """Makes counts and reports leave with the outputs of a model runner.

        What has been counted before the runner first samples, with the random logits of vLLM's
        memory profiling, is dropped. What V2's warm-up requests count leaves with outputs that
        nobody reads, since they, too, end in a step without tokens. On an accelerator the counts
        leave about once a second, and all of them in the step without tokens by which vLLM ends the
        last request.

        Args:
            runner: vLLM's V1 or V2 `GPUModelRunner` with a rejection sampler. Its `execute_model`
                and `sample_tokens` are wrapped, on this instance alone; the output of a rank that
                nobody reads is left as it is.
        """
        if is_read := _is_read(runner):
            self._runner = runner
        execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
        has_begun = has_news = False

        def execute_and_flush(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_news
            output = execute_model(*args, **kwargs)
            # With requests left, a step without tokens is a poll or a bubble, which must not wait.
            if not is_read or not has_news or _has_requests(runner):
                return output
            has_news = False
            return self._with_all_counts(output)

        def sample_and_report(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_begun, has_news
            if not has_begun:
                has_begun = True
                self.counters.take_delta(flush=True)
            self.asked.clear()
            output = sample_tokens(*args, **kwargs)
            has_news = True
            if is_read and (carrier := carrier_of(output)) is not None:
                self._report(output, carrier)
            return output

        runner.execute_model = execute_and_flush
        runner.sample_tokens = sample_and_report

    def copy_to_host(self) -> None:
        """Copies to the host what requests ask of the verification that was enqueued last, on V2.

        On the stream of vLLM's own output, and before the drafter is enqueued: a step's tokens do
        not wait for its next drafts.
        """
        if not self.asked or self._runner is None:
            return
        from vllm.v1.worker.gpu.async_utils import stream

        for number, asked in enumerate(self.asked):
            table = asked.table
            if asked.copy is not None or table.device.type == "cpu":
                continue
            copy_stream, main_stream = self._runner.output_copy_stream, self._runner.main_stream
            rows = torch.empty_like(table, device="cpu", pin_memory=True)
            with stream(copy_stream, main_stream):
                copy_stream.wait_stream(main_stream)
                rows.copy_(table, non_blocking=True)
                event = torch.Event(table.device)
                event.record(copy_stream)
            self.asked[number] = asked._replace(copy=(rows, event))

    def _report(self, output: Any, carrier: ModelRunnerOutput) -> None:
        """Lays a step's report on its output.

        Args:
            output: what `sample_tokens` returns. If it is asynchronous and copies are under way,
                its `get_output` is wrapped, on this instance alone: they are waited for there.
            carrier: its ModelRunnerOutput.
        """
        counts, asked = self.counters.take_delta(), list(self.asked)
        if counts is None and not asked:
            return

        def report() -> StepReport:
            return StepReport(counts, {k: rows for it in asked for k, rows in it.rows().items()})

        if all(it.copy is None for it in asked) or not hasattr(output, "get_output"):
            put(carrier, report())
            return
        get_output = output.get_output

        def get_and_report() -> Any:
            result = get_output()
            put(carrier_of(result), report())
            return result

        output.get_output = get_and_report

    def _with_all_counts(self, output: Any) -> Any:
        """What `execute_model` returns, with all counts if it is the result of an empty step.

        Such a step runs when the last request has ended, so a wait for the device delays nobody.
        The output object that all empty steps share is copied, not changed.
        """
        if not isinstance(output, ModelRunnerOutput) or output.req_ids:
            return output
        counts = self.counters.take_delta(flush=True)
        if counts is None:
            return output
        output = copy.copy(output)
        put(output, StepReport(counts))
        return output


def _is_read(runner: Any) -> bool:
    """Whether a rank's outputs are read: the first's; all, if each is an engine, as by torchrun."""
    from vllm.distributed import get_tensor_model_parallel_rank

    backend = runner.vllm_config.parallel_config.distributed_executor_backend
    is_first: bool = get_tensor_model_parallel_rank() == 0
    return is_first or backend == "external_launcher"


def _has_requests(runner: Any) -> bool:
    """Whether a V1 or V2 runner still holds requests."""
    states = getattr(runner, "req_states", None)
    return bool(runner.requests if states is None else states.req_id_to_index)


def carrier_of(output: Any) -> ModelRunnerOutput | None:
    """The ModelRunnerOutput that a runner's result is or will become, or None if there is none.

    Args:
        output: what `sample_tokens` of a V1 or V2 runner returns. The output object that all empty
            steps share is no carrier.
    """
    if isinstance(output, AsyncModelRunnerOutput):
        # Asynchronous scheduling: V1 and V2 hold what `get_output` fills in and returns.
        for name in ("_model_runner_output", "model_runner_output"):
            if (inner := getattr(output, name, None)) is not None:
                output = inner
    if isinstance(output, ModelRunnerOutput) and output is not EMPTY_MODEL_RUNNER_OUTPUT:
        return output
    return None
