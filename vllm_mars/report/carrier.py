"""Reports that cross vLLM's process boundaries, and the vLLM objects that carry them.

    worker to core     a `StepReport` on the step's ModelRunnerOutput, which is pickled
    core to server     an `EngineReport` on SchedulerStats, which one API server gets, and parts of
                       a request's report on its RequestSpecDecodeMetrics, if it wants one

The attribute is called `mars`. The last two are encoded as msgpack, which only carries declared
fields, so the field is added to their classes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FIELD = "mars"
# Per token of a request: see the table of `StepCounters`.
Rows = Sequence[Sequence[float]]


class StepReport(NamedTuple):
    # Increase of each counter since the last report with counts.
    counts: list[int] | None = None
    # By id of the requests that want a report.
    rows: Mapping[str, Rows] = {}


class EngineReport(NamedTuple):
    # As in StepReport.
    counts: list[int] | None
    # Whether another report follows even if no request arrives.
    has_more: bool


def put(carrier: Any, report: Any) -> None:
    setattr(carrier, FIELD, report)


def found_on(carrier: Any) -> Any:
    """Returns the report on one of vLLM's objects, or None."""
    return getattr(carrier, FIELD, None)


def declare(stats: type, kind: Any) -> None:
    """Adds the field, None until it is set, to a vLLM dataclass; idempotent.

    Must run before msgspec creates a decoder for the class, which caches the fields.
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
    declare(stats.SchedulerStats, EngineReport | None)
    declare(stats.RequestSpecDecodeMetrics, dict[str, Any] | None)


def add_counts(counts: list[int], increase: list[int]) -> list[int]:
    return [old + new for old, new in zip(counts, increase, strict=True)]
