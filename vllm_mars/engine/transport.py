"""The way of the counts through vLLM: worker, engine core, front end, each with a step's own data.

    worker        the increase is an attribute of the step's ModelRunnerOutput, which is pickled
    engine core   the scheduler takes it off and adds it to the next SchedulerStats
    front end     vLLM gives each SchedulerStats to one API server, whose stat loggers record it

No message, process or thread is added. SchedulerStats crosses the last border as msgpack, which
carries the fields of the dataclass and nothing else, so it is given one more.
"""

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from vllm_mars.config import MarsConfig
from vllm_mars.runner.counters import CounterLayout, Counters
from vllm_mars.runner.margin import MarginRule, Relaxed

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput

# The attribute of ModelRunnerOutput and the field of SchedulerStats.
FIELD = "mars_counts"
# The attribute of ModelRunnerOutput with what was relaxed of some requests.
RELAXED_FIELD = "mars_relaxed"
# The field of RequestSpecDecodeMetrics with all that was.
REQUEST_FIELD = "mars"


def attach_counters(runner: Any, rule: MarginRule) -> None:
    """Makes the counts of a model runner leave with its outputs, and what requests asked for.

    What has been counted before the runner first samples, with the random logits of vLLM's memory
    profiling, is dropped. What V2's warm-up requests count leaves with outputs that nobody reads,
    since they, too, end in a step without tokens. On an accelerator the counts leave about once a
    second, and all of them in the step without tokens by which vLLM ends the last request.

    Args:
        runner: vLLM's V1 or V2 `GPUModelRunner` with a rejection sampler. Its `execute_model` and
            `sample_tokens` are wrapped, on this instance alone; on a tensor-parallel rank whose
            output vLLM drops, nothing is counted.
        rule: gets its counters.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    is_first_rank = get_tensor_model_parallel_rank() == 0
    counters = Counters(layout_of(rule.config, runner.speculative_config), runner.device)
    if is_first_rank:
        rule.counters = counters
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
    has_begun = False

    def execute_and_flush(*args: Any, **kwargs: Any) -> Any:
        return with_counts(execute_model(*args, **kwargs), counters)

    def sample_and_report(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            counters.take_delta(flush=True)
        rule.relaxed.clear()
        output = sample_tokens(*args, **kwargs)
        carrier = carrier_of(output)
        if carrier is not None and (increase := counters.take_delta()):
            setattr(carrier, FIELD, increase)
        if rule.relaxed and is_first_rank:
            attach_relaxed(output, carrier, rule.relaxed)
        return output

    runner.execute_model = execute_and_flush
    runner.sample_tokens = sample_and_report


def attach_relaxed(
    output: Any, carrier: "ModelRunnerOutput | None", relaxed: "list[Relaxed]"
) -> None:
    """Sends what was relaxed in a step along with its output.

    Args:
        output: what `sample_tokens` returns. If it is asynchronous, its `get_output` is wrapped, on
            this instance alone: the copy from the device is waited for there.
        carrier: its ModelRunnerOutput, which gets the offsets within the step's tokens by request.
        relaxed: what the sampler noted.
    """
    if carrier is None:
        return
    waiting: list[tuple[dict[int, str], torch.Tensor, torch.Event | None]] = []
    for request_ids, table in relaxed:
        places = torch.tensor(list(request_ids))
        if table.device.type == "cpu":
            waiting.append((request_ids, table[places], None))
            continue
        rows = table[places.to(table.device, non_blocking=True)]
        copy = torch.empty_like(rows, device="cpu", pin_memory=True)
        copy.copy_(rows, non_blocking=True)
        event = torch.Event(table.device)
        event.record()
        waiting.append((request_ids, copy, event))

    def offsets() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for request_ids, rows, event in waiting:
            if event is not None:
                event.synchronize()
            for request_id, row in zip(request_ids.values(), rows, strict=True):
                found[request_id] = row.nonzero().flatten().tolist()
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


def layout_of(config: MarsConfig, speculative_config: Any) -> CounterLayout:
    """Which counter is what in an engine.

    Args:
        config: its options.
        speculative_config: vLLM's `SpeculativeConfig`.
    """
    thetas = config.shadow_thetas if config.shadow else ()
    return CounterLayout(speculative_config.num_speculative_tokens, thetas)


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


def declare_field(stats: type, name: str = FIELD, kind: Any = list[int] | None) -> None:
    """Gives a dataclass of vLLM's one more field; idempotent.

    Must run before msgspec makes a decoder for the class, since it remembers the fields. Where the
    field is never set, the class is encoded as without it.

    Args:
        stats: the dataclass, such as `SchedulerStats`. Its `__init__` stays as it is: the field is
            None until it is set.
        name: of the field.
        kind: its type.
    """
    fields: dict[str, Any] = stats.__dataclass_fields__  # type: ignore[attr-defined]
    if name in fields:
        return
    field = dataclasses.field(default=None, init=False)
    declared: Any = dataclasses.make_dataclass("Declared", [(name, kind, field)])
    fields[name] = declared.__dataclass_fields__[name]
    stats.__annotations__[name] = declared.__annotations__[name]
    setattr(stats, name, None)


def carry_counts(scheduler: Any) -> None:
    """Makes a scheduler pass the counts on, from the workers' outputs to its statistics.

    Args:
        scheduler: vLLM's `Scheduler`, or a subclass of it. Its `update_from_output` and
            `make_stats` are wrapped, on this instance alone.
    """
    from vllm.v1.metrics.stats import SchedulerStats

    declare_field(SchedulerStats)
    update_from_output, make_stats = scheduler.update_from_output, scheduler.make_stats
    pending: list[int] | None = None

    def update_and_take(scheduler_output: Any, model_runner_output: Any) -> Any:
        nonlocal pending
        increase = vars(model_runner_output).pop(FIELD, None)
        if increase is not None:
            pending = increase if pending is None else add_counts(pending, increase)
        return update_from_output(scheduler_output, model_runner_output)

    def make_with_counts(*args: Any, **kwargs: Any) -> Any:
        nonlocal pending
        stats = make_stats(*args, **kwargs)
        # None where statistics are off.
        if stats is not None and pending is not None:
            setattr(stats, FIELD, pending)
            pending = None
        return stats

    scheduler.update_from_output = update_and_take
    scheduler.make_stats = make_with_counts


def add_counts(counts: list[int], increase: list[int]) -> list[int]:
    """The sum of two vectors of counts, entry by entry."""
    return [old + new for old, new in zip(counts, increase, strict=True)]
