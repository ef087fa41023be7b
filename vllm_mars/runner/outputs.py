"""What leaves a worker with the outputs of its steps: counts, and what requests asked for.

Each is an attribute of vLLM's ModelRunnerOutput, which is pickled, and which the engine core takes
them off again (`vllm_mars.engine.transport`). No message, process or thread is added.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch

from vllm_mars.runner.counters import Counters, layout_of
from vllm_mars.runner.margin import MarginRule, RelaxedOffsets

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput

# The attribute with the counts, and that with what was relaxed of some requests.
FIELD = "mars_counts"
RELAXED_FIELD = "mars_relaxed"


def attach_counters(runner: Any, rule: MarginRule) -> None:
    """Makes the counts of a model runner leave with its outputs, and what requests asked for.

    What has been counted before the runner first samples, with the random logits of vLLM's memory
    profiling, is dropped. What V2's warm-up requests count leaves with outputs that nobody reads,
    since they, too, end in a step without tokens. On an accelerator the counts leave about once a
    second, and all of them in the step without tokens by which vLLM ends the last request.

    Args:
        runner: vLLM's V1 or V2 `GPUModelRunner` with a rejection sampler. Its `execute_model` and
            `sample_tokens` are wrapped, on this instance alone; on a tensor-parallel rank whose
            output vLLM drops, nothing is counted. With an external launcher, such as torchrun, each
            rank has an engine of its own, which drops nothing.
        rule: gets its counters.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    parallel_config = runner.vllm_config.parallel_config
    is_engines_own = parallel_config.distributed_executor_backend == "external_launcher"
    is_read = is_engines_own or get_tensor_model_parallel_rank() == 0
    counters = Counters(layout_of(rule.config, runner.speculative_config), runner.device)
    if is_read:
        rule.counters = counters
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
    has_begun = False

    def execute_and_flush(*args: Any, **kwargs: Any) -> Any:
        return with_counts(execute_model(*args, **kwargs), counters)

    def sample_and_attach(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            counters.take_delta(flush=True)
        rule.relaxed.clear()
        output = sample_tokens(*args, **kwargs)
        carrier = carrier_of(output)
        if carrier is not None and (increase := counters.take_delta()):
            setattr(carrier, FIELD, increase)
        if rule.relaxed and is_read:
            attach_relaxed(output, carrier, rule.relaxed)
        return output

    runner.execute_model = execute_and_flush
    runner.sample_tokens = sample_and_attach


def attach_relaxed(
    output: Any, carrier: "ModelRunnerOutput | None", relaxed: "list[RelaxedOffsets]"
) -> None:
    """Sends what was relaxed in a step along with its output.

    Args:
        output: what `sample_tokens` returns. If it is asynchronous, its `get_output` is wrapped, on
            this instance alone: the copy from the device is waited for there.
        carrier: its ModelRunnerOutput, which gets, by request, the offset of each relaxed token
            within the step's tokens and what it lost, in units of 2**-LOSS_BITS nats.
        relaxed: what the sampler noted.
    """
    if carrier is None:
        return
    waiting: list[tuple[dict[int, str], torch.Tensor, torch.Event | None]] = []
    for request_ids, table in relaxed:
        places = torch.tensor(list(request_ids)).to(table.device, non_blocking=True)
        rows, event = table[places], None
        if table.device.type != "cpu":
            on_host = torch.empty_like(rows, device="cpu", pin_memory=True)
            rows = on_host.copy_(rows, non_blocking=True)
            event = torch.Event(table.device)
            event.record()
        waiting.append((request_ids, rows, event))

    def offsets() -> dict[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = {}
        for request_ids, rows, event in waiting:
            if event is not None:
                event.synchronize()
            for request_id, row in zip(request_ids.values(), rows, strict=True):
                losses = enumerate(row.tolist())
                found[request_id] = [(offset, lost) for offset, lost in losses if lost >= 0]
        return found

    if all(event is None for _, _, event in waiting) or not hasattr(output, "get_output"):
        setattr(carrier, RELAXED_FIELD, offsets())
        return
    get_output = output.get_output

    def get_with_offsets() -> Any:
        result = get_output()
        setattr(carrier_of(result), RELAXED_FIELD, offsets())
        return result

    output.get_output = get_with_offsets


def carrier_of(output: Any) -> "ModelRunnerOutput | None":
    """The ModelRunnerOutput that a runner's result is or will become, or None if there is none.

    Args:
        output: what `sample_tokens` of a V1 or V2 runner returns. The output object that all empty
            steps share is no carrier.
    """
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

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
    from vllm.v1.outputs import ModelRunnerOutput

    if not isinstance(output, ModelRunnerOutput) or output.req_ids:
        return output
    increase = counters.take_delta(flush=True)
    if increase is None:
        return output
    output = copy.copy(output)
    setattr(output, FIELD, increase)
    return output
