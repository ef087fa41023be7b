"""How counts travel through vLLM, each beside the data of the step that it belongs to.

    worker        the increase is an attribute of the step's ModelRunnerOutput: `runner.outputs`
    engine core   the scheduler takes it off and adds it to the next SchedulerStats
    front end     vLLM gives each SchedulerStats to one API server, whose stat loggers record it

No message, process or thread is added. SchedulerStats crosses the last border as msgpack, which
carries the fields of the dataclass and nothing else, so it is given one more.
"""

import dataclasses
from typing import Any

from vllm_mars.config import MarsConfig
from vllm_mars.runner.outputs import FIELD

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


def carry_counts(scheduler: Any, _: MarsConfig) -> None:
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
