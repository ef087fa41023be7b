"""Counts as Prometheus metrics next to vLLM's, and as a line in the log; in the server.

Each engine has its series with vLLM's labels, in the classes of vLLM's stat logger, so that the
counts of several API servers add up.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import prometheus_client

from vllm_mars import __version__
from vllm_mars.kernels.budget import UNIT
from vllm_mars.kernels.counters.table import BUCKETS, COUNTERS, REASONS, CounterLayout
from vllm_mars.options.config import MarsConfig
from vllm_mars.options.overrides import Overrides, overrides_of
from vllm_mars.report.carrier import EngineReport, add_counts, found_on

logger = logging.getLogger(f"vllm.{__name__}")

ALLOWED = "vllm:mars_max_loss_nats_per_token"
OVERRIDE = "vllm:mars_override"
INFO = "vllm:mars_info"

# Of the gauges; `COUNTERS` has the texts of the counters.
_HELP = {
    ALLOWED: "Largest loss of an answer per token that this server allows, in nats: mars_limit, or "
    "else mars_max_loss.",
    OVERRIDE: "Value that VLLM_MARS_OVERRIDES sets for new requests, by option; NaN if none.",
    INFO: "1, with the version of vllm-mars, the option of this server's rule, its value, whether "
    "that is lossy, and the loosest value that a request may choose.",
}
# Relaxable positions without any gain before the log warns. If one in 200 gained something, fewer
# than one server in 100 would get here without a gain.
INERT_AFTER = 1000
_LABELS = ("model_name", "engine")


class MarsProm:
    """Prometheus metrics of all engines that a front end sees.

    Args:
        engines: values of the labels `model_name` and `engine`, by engine.
        counter_class, gauge_class, histogram_class: prometheus_client's or Ray's, as vLLM chooses.
    """

    def __init__(
        self,
        layout: CounterLayout,
        engines: dict[int, list[object]],
        config: MarsConfig,
        counter_class: Any = prometheus_client.Counter,
        gauge_class: Any = prometheus_client.Gauge,
        histogram_class: Any = prometheus_client.Histogram,
    ) -> None:
        self._layout = layout
        values_by_label = {
            "position": [(str(position),) for position in range(layout.num_speculative_tokens)],
            "reason": [(reason,) for reason in REASONS],
        }
        # By counter and engine, a child for each entry.
        self._children: dict[str, dict[int, list[Any]]] = {}
        for name, (metric, text, by, _) in COUNTERS.items():
            if not metric or by == "bucket":
                continue
            counter = counter_class(
                name=metric, documentation=text, labelnames=[*_LABELS, *([by] if by else [])]
            )
            self._children[name] = {
                engine: [
                    counter.labels(*engine_labels, *value)
                    for value in values_by_label.get(by, [()])
                ]
                for engine, engine_labels in engines.items()
            }
        lost = COUNTERS["ended_lost"]
        histogram = histogram_class(
            name=lost.metric,
            documentation=lost.text,
            labelnames=list(_LABELS),
            buckets=list(BUCKETS),
        )
        self._request_lost = {
            engine: histogram.labels(*engine_labels) for engine, engine_labels in engines.items()
        }
        info = _gauge(gauge_class, INFO, "version", "rule", "value", "lossy", "limit")
        option: str = config.rule.option
        value: float | None = config.value
        limit = config.value
        if config.sets_price:
            option = "mars_max_loss"
            value = config.max_loss
            limit = config.most_max_loss
        for engine_labels in engines.values():
            info.labels(
                *engine_labels,
                __version__,
                option,
                f"{value:g}",
                str(config.lossy).lower(),
                f"{limit:g}",
            ).set(1)
        if config.most_max_loss < math.inf:
            allowed = _gauge(gauge_class, ALLOWED)
            for engine_labels in engines.values():
                allowed.labels(*engine_labels).set(config.most_max_loss)

    def observe(self, counts: list[int] | None, engine: int = 0) -> None:
        """Adds an increase of one engine's counts; None is no increase."""
        if counts is None:
            return
        _check_length(counts, self._layout)
        for name, children in self._children.items():
            entries = counts[getattr(self._layout, name)]
            for child, count in zip(children[engine], entries, strict=True):
                if count:
                    child.inc(count * COUNTERS[name].unit)
        # Each request of a bucket counts with their mean, so that the histogram's sum is exact.
        ended = counts[self._layout.ended]
        lost = counts[self._layout.ended_lost]
        for number, nats in zip(ended, lost, strict=True):
            for _ in range(number):
                self._request_lost[engine].observe(nats * UNIT / number)


class MarsLogging:
    """Sums counts between lines of the log.

    It warns once if many relaxable positions were verified without any gain: the options have no
    effect then, and nothing else shows it.
    """

    def __init__(self, layout: CounterLayout) -> None:
        self._layout = layout
        self._counts = [0] * layout.size
        self._generated = 0
        # Counts since the server's start; None after a gain or the warning.
        self._inert: list[int] | None = list(self._counts)

    def observe(self, counts: list[int] | None, generated: int) -> None:
        self._generated += generated
        if counts is not None:
            _check_length(counts, self._layout)
            self._counts = add_counts(self._counts, counts)

    def log(self, prefix: str = "") -> None:
        """Logs the sums since the last call, or nothing if no position was verified."""
        layout = self._layout
        counts = self._counts
        generated = self._generated
        self._counts = [0] * layout.size
        self._generated = 0
        if not any(counts[layout.verified]):
            return
        gained, lost, up, down = (
            sum(counts[entries]) * UNIT
            for entries in (layout.gained, layout.lost, layout.drift_up, layout.drift_down)
        )
        logger.info(
            "%sMARS metrics: Gained: %.1f draft tokens (%.1f%% of accepted), Lost: %.4f nats per "
            "token, Drift: %+.4f nats per token, Relaxed outright: %d tokens",
            prefix,
            gained,
            100 * share(gained, sum(counts[layout.accepted])),
            share(lost, generated),
            share(up - down, generated),
            sum(counts[layout.relaxed]),
        )
        self._warn_if_inert(counts, prefix)

    def _warn_if_inert(self, counts: list[int], prefix: str) -> None:
        if self._inert is None:
            return
        if any(counts[self._layout.gained]):
            self._inert = None
            return
        self._inert = add_counts(self._inert, counts)
        (evidence,) = self._inert[self._layout.relaxable]
        if evidence < INERT_AFTER:
            return
        refused = zip(REASONS, self._inert[self._layout.refused], strict=True)
        self._inert = None
        logger.warning(
            "%sMARS has gained nothing at %d verified positions of requests that are not strict "
            "since the server's start, so it has had no effect. Refusals: %s. `vllm-mars doctor "
            "URL` checks a running server.",
            prefix,
            evidence,
            ", ".join(f"{reason} {count}" for reason, count in refused if count) or "none",
        )


def share(part: float, whole: float) -> float:
    """Returns `part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def add_metrics(stat_logger: Any, config: MarsConfig) -> None:
    """Makes a `PrometheusStatLogger` of vLLM also export the counts."""
    speculative_config = stat_logger.vllm_config.speculative_config
    prom = MarsProm(
        layout=CounterLayout(speculative_config.num_speculative_tokens),
        engines=stat_logger.per_engine_labelvalues,
        config=config,
        counter_class=stat_logger._counter_cls,
        gauge_class=stat_logger._gauge_cls,
        histogram_class=stat_logger._histogram_cls,
    )
    _observe_records(stat_logger, lambda counts, _, engine: prom.observe(counts, engine))
    if (overrides := overrides_of(config)) is not None:
        _add_override(stat_logger, config, overrides)


def _gauge(gauge_class: Any, name: str, *labels: str) -> Any:
    return gauge_class(
        name=name,
        documentation=_HELP[name],
        labelnames=[*_LABELS, *labels],
        # Otherwise each API server would have a separate series.
        multiprocess_mode="mostrecent",
    )


def _add_override(stat_logger: Any, config: MarsConfig, overrides: Overrides) -> None:
    gauge = _gauge(stat_logger._gauge_cls, OVERRIDE, "option")

    def show(options: Mapping[str, float]) -> None:
        for option in (config.rule.option, "mars_max_loss"):
            for engine_labels in stat_logger.per_engine_labelvalues.values():
                gauge.labels(*engine_labels, option).set(options.get(option, math.nan))

    overrides.observe(show)


def add_log_line(stat_logger: Any, config: MarsConfig) -> None:
    """Makes a `LoggingStatLogger` of vLLM also log the counts, after its lines."""
    ours = MarsLogging(
        CounterLayout(stat_logger.vllm_config.speculative_config.num_speculative_tokens)
    )
    log = stat_logger.log

    @functools.wraps(log)
    def log_and_add() -> None:
        log()
        ours.log(stat_logger.log_prefix)

    stat_logger.log = log_and_add
    _observe_records(stat_logger, lambda counts, generated, _: ours.observe(counts, generated))


def _observe_records(
    stat_logger: Any, observe: Callable[[list[int] | None, int, int], None]
) -> None:
    """Calls `observe` after each record with counts (or None), generated tokens and engine."""
    record = stat_logger.record
    names = "scheduler_stats", "iteration_stats"

    @functools.wraps(record)
    def record_and_observe(*args: Any, **kwargs: Any) -> None:
        record(*args, **kwargs)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        report: EngineReport | None = found_on(arguments.get("scheduler_stats"))
        generated = getattr(arguments.get("iteration_stats"), "num_generation_tokens", 0)
        observe(report and report.counts, generated, arguments.get("engine_idx", 0))

    stat_logger.record = record_and_observe


def _check_length(counts: list[int], layout: CounterLayout) -> None:
    if len(counts) != layout.size:
        raise RuntimeError(
            f"{len(counts)} counts came from a worker, but {layout.size} were expected; install "
            "the same version of vllm-mars on every node."
        )


def drain_counts(engine: Any, _: MarsConfig) -> None:
    """Makes an `LLM` read outputs until its engine is idle, so that its metrics are complete."""
    # Data-parallel ranks must agree on `has_unfinished_requests`, which ends the loop of an `LLM`.
    if engine.vllm_config.parallel_config.data_parallel_size > 1:
        return
    client = engine.engine_core
    get_output = client.get_output
    has_unfinished_requests = engine.has_unfinished_requests
    has_more = False

    def get_and_note() -> Any:
        nonlocal has_more
        outputs = get_output()
        if outputs.scheduler_stats is not None:
            report: EngineReport | None = found_on(outputs.scheduler_stats)
            has_more = report is not None and report.has_more
        return outputs

    client.get_output = get_and_note
    engine.has_unfinished_requests = lambda: has_unfinished_requests() or has_more
