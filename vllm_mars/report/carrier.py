"""What crosses the borders of vLLM's processes, and on which of its objects.

    worker to core     a `StepReport` on the step's ModelRunnerOutput, which is pickled
    core to server     an `EngineReport` on SchedulerStats, which one API server gets, and of each
                       request that asks a part of its report on its RequestSpecDecodeMetrics

The last two are encoded as msgpack, which carries the fields of a dataclass and nothing else, so
they are given one more. It is called `mars` on each.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FIELD = "mars"
# Of each token of a request: see the table of `StepCounters`.
Rows = Sequence[Sequence[float]]


class StepReport(NamedTuple):
    """What a step did.

    Attributes:
        counts: by how much each counter rose since the last report that has them.
        rows: of the requests that ask, by id.
    """

    counts: list[int] | None = None
    rows: Mapping[str, Rows] = {}


class EngineReport(NamedTuple):
    """What an engine tells its server.

    Attributes:
        counts: by how much each counter rose since the last report that has them.
        has_more: whether another one follows, whether or not a request comes.
    """

    counts: list[int] | None
    has_more: bool


def put(carrier: Any, report: Any) -> None:
    """Lays a report on one of vLLM's objects."""
    setattr(carrier, FIELD, report)


def found_on(carrier: Any) -> Any:
    """What lies on one of vLLM's objects, or None."""
    return getattr(carrier, FIELD, None)


def declare(stats: type, kind: Any) -> None:
    """Gives a dataclass of vLLM's the field; idempotent.

    Must run before msgspec makes a decoder for the class, since it remembers the fields. Where the
    field is never set, the class is encoded as without it.

    Args:
        stats: the dataclass. Its `__init__` stays as it is: the field is None until it is set.
        kind: type of the field.
    """
    fields: dict[str, Any] = stats.__dataclass_fields__  # type: ignore[attr-defined]
    if FIELD in fields:
        return
    field = dataclasses.field(default=None, init=False)
    declared: Any = dataclasses.make_dataclass("Declared", [(FIELD, kind, field)])
    fields[FIELD] = declared.__dataclass_fields__[FIELD]
    stats.__annotations__[FIELD] = declared.__annotations__[FIELD]
    setattr(stats, FIELD, None)


def declare_fields(stats: Any) -> None:
    """Gives the classes of vLLM's module `v1.metrics.stats` what they have to carry."""
    declare(stats.SchedulerStats, EngineReport | None)
    declare(stats.RequestSpecDecodeMetrics, dict[str, Any] | None)


def add_counts(counts: list[int], increase: list[int]) -> list[int]:
    """The sum of two vectors of counts, entry by entry."""
    return [old + new for old, new in zip(counts, increase, strict=True)]
