"""How counts travel through vLLM, each beside the data of the step that it belongs to.

    worker        the increase is an attribute of the step's ModelRunnerOutput: `runner.outputs`
    engine core   the scheduler takes it off and adds it to the next SchedulerStats
    front end     vLLM gives each SchedulerStats to one API server, whose stat loggers record it

Behind the step that ends the last request comes one without tokens, which brings all that is left.
A server reads it as it reads all. An `LLM`, which reads no more than its requests need, is told
that there is more to read.

No message, process or thread is added. SchedulerStats crosses the last border as msgpack, which
carries the fields of the dataclass and nothing else, so it is given one more.
"""

import dataclasses
from typing import Any

from vllm_mars.options.config import MarsConfig
from vllm_mars.report.outputs import FIELD

# The field of SchedulerStats that says that another one follows, whether or not a request comes.
_MORE_FIELD = "mars_more"
# The field of RequestSpecDecodeMetrics with all that was relaxed of a request.
REQUEST_FIELD = "mars"


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


def declare_fields(scheduler_stats: type) -> None:
    """Gives SchedulerStats what it has to carry; idempotent."""
    declare_field(scheduler_stats)
    declare_field(scheduler_stats, _MORE_FIELD, bool | None)


def read_on(engine: Any, _: MarsConfig) -> None:
    """Makes an `LLM` read what its engine sends until that is idle, so that its metrics are whole.

    Args:
        engine: vLLM's `LLMEngine`. Its `has_unfinished_requests`, by which an `LLM` reads on, is
            wrapped, on this instance alone, and so is its client's `get_output`. Not where ranks of
            data parallelism agree on that.
    """
    if engine.vllm_config.parallel_config.data_parallel_size > 1:
        return
    client, has_unfinished_requests = engine.engine_core, engine.has_unfinished_requests
    get_output = client.get_output
    has_more = False

    def get_and_note() -> Any:
        nonlocal has_more
        outputs = get_output()
        if outputs.scheduler_stats is not None:
            has_more = bool(getattr(outputs.scheduler_stats, _MORE_FIELD, None))
        return outputs

    client.get_output = get_and_note
    engine.has_unfinished_requests = lambda: has_unfinished_requests() or has_more


def carry_counts(scheduler: Any, _: MarsConfig) -> None:
    """Makes a scheduler pass the counts on, from the workers' outputs to its statistics.

    Args:
        scheduler: vLLM's `Scheduler`, or a subclass of it. Its `schedule`, `update_from_output` and
            `make_stats` are wrapped, on this instance alone.
    """
    from vllm.v1.metrics.stats import SchedulerStats

    declare_fields(SchedulerStats)
    schedule, make_stats = scheduler.schedule, scheduler.make_stats
    update_from_output = scheduler.update_from_output
    pending: list[int] | None = None
    # Steps that have been scheduled and not yet come back.
    num_under_way = 0

    def schedule_and_count(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_under_way
        scheduled = schedule(*args, **kwargs)
        num_under_way += 1
        return scheduled

    def update_and_take(scheduler_output: Any, model_runner_output: Any) -> Any:
        nonlocal pending, num_under_way
        num_under_way -= 1
        increase = vars(model_runner_output).pop(FIELD, None)
        if increase is not None:
            pending = increase if pending is None else add_counts(pending, increase)
        return update_from_output(scheduler_output, model_runner_output)

    def make_with_counts(*args: Any, **kwargs: Any) -> Any:
        nonlocal pending
        stats = make_stats(*args, **kwargs)
        # None where statistics are off.
        if stats is not None:
            if pending is not None:
                setattr(stats, FIELD, pending)
                pending = None
            if num_under_way or scheduler.has_requests():
                setattr(stats, _MORE_FIELD, True)
        return stats

    scheduler.schedule = schedule_and_count
    scheduler.update_from_output = update_and_take
    scheduler.make_stats = make_with_counts


def add_counts(counts: list[int], increase: list[int]) -> list[int]:
    """The sum of two vectors of counts, entry by entry."""
    return [old + new for old, new in zip(counts, increase, strict=True)]
