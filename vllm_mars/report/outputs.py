"""What leaves a worker with the outputs of its steps: counts, and what requests asked for.

Each is an attribute of vLLM's ModelRunnerOutput, which is pickled, and which the engine core takes
them off again (`vllm_mars.report.transport`). No message, process or thread is added.
"""

import copy
from typing import Any

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_mars.report.counters import Counters
from vllm_mars.worker.verification import Returned, Verification

# The attribute with the counts, and that with what a step did, for the requests that ask.
FIELD = "mars_counts"
RETURNED_FIELD = "mars_returned"


def attach_counters(runner: Any, verification: Verification) -> None:
    """Makes the counts of a model runner leave with its outputs, and what requests asked for.

    What has been counted before the runner first samples, with the random logits of vLLM's memory
    profiling, is dropped. What V2's warm-up requests count leaves with outputs that nobody reads,
    since they, too, end in a step without tokens. On an accelerator the counts leave about once a
    second, and all of them in the step without tokens by which vLLM ends the last request.

    Args:
        runner: vLLM's V1 or V2 `GPUModelRunner` with a rejection sampler. Its `execute_model` and
            `sample_tokens` are wrapped, on this instance alone; the output of a rank that nobody
            reads is left as it is.
        verification: of this runner.
    """
    is_read = _is_read(runner)
    counters = verification.counters
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
    has_begun = has_news = False

    def execute_and_flush(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_news
        output = execute_model(*args, **kwargs)
        # With requests left, a step without tokens is a poll or a bubble, which must not wait.
        if not is_read or not has_news or _has_requests(runner):
            return output
        has_news = False
        return with_counts(output, counters)

    def sample_and_attach(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_begun, has_news
        if not has_begun:
            has_begun = True
            counters.take_delta(flush=True)
        verification.returned.clear()
        output = sample_tokens(*args, **kwargs)
        has_news = True
        if is_read and (carrier := carrier_of(output)) is not None:
            if increase := counters.take_delta():
                setattr(carrier, FIELD, increase)
            if verification.returned:
                attach_returned(output, carrier, list(verification.returned))
        return output

    runner.execute_model = execute_and_flush
    runner.sample_tokens = sample_and_attach


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


def send_returned(runner: Any, verification: Verification) -> None:
    """Copies to the host what the requests want to know of the verification that was enqueued last.

    On the stream of vLLM's own output, and before the drafter is enqueued: a step's tokens do not
    wait for its next drafts.

    Args:
        runner: vLLM's V2 `GPUModelRunner`.
        verification: of this runner.
    """
    if not verification.returned:
        return
    from vllm.v1.worker.gpu.async_utils import stream

    for number, returned in enumerate(verification.returned):
        table = returned.table
        if returned.copy is not None or table.device.type == "cpu" or not _is_read(runner):
            continue
        copy_stream, main_stream = runner.output_copy_stream, runner.main_stream
        rows = torch.empty_like(table, device="cpu", pin_memory=True)
        with stream(copy_stream, main_stream):
            copy_stream.wait_stream(main_stream)
            rows.copy_(table, non_blocking=True)
            event = torch.Event(table.device)
            event.record(copy_stream)
        verification.returned[number] = returned._replace(copy=(rows, event))


def attach_returned(output: Any, carrier: ModelRunnerOutput, returned: list[Returned]) -> None:
    """Sends what a step did along with its output.

    Args:
        output: what `sample_tokens` returns. If it is asynchronous, its `get_output` is wrapped, on
            this instance alone: the copy from the device is waited for there.
        carrier: its ModelRunnerOutput, which gets, by request, what the step's table holds of each
            of its tokens.
        returned: what the sampler noted. It keeps the tables until their copies are made.
    """

    def by_request() -> dict[str, list[list[float]]]:
        found: dict[str, list[list[float]]] = {}
        for request_ids, rows, copied in returned:
            if copied is not None:
                rows, event = copied
                event.synchronize()
            for place, request_id in request_ids.items():
                found[request_id] = rows[place].T.tolist()
        return found

    if all(it.copy is None for it in returned) or not hasattr(output, "get_output"):
        setattr(carrier, RETURNED_FIELD, by_request())
        return
    get_output = output.get_output

    def get_with_returned() -> Any:
        result = get_output()
        setattr(carrier_of(result), RETURNED_FIELD, by_request())
        return result

    output.get_output = get_with_returned


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


def with_counts(output: Any, counters: Counters) -> Any:
    """What `execute_model` returns, with all counts if it is the result of a step without tokens.

    Such a step runs when the last request has ended, so that a wait for the device delays nobody.

    Args:
        output: what `execute_model` returns; None if tokens are to be sampled. The output object
            that all empty steps share is copied, not changed.
        counters: where the counts come from.
    """
    if not isinstance(output, ModelRunnerOutput) or output.req_ids:
        return output
    increase = counters.take_delta(flush=True)
    if increase is None:
        return output
    output = copy.copy(output)
    setattr(output, FIELD, increase)
    return output
