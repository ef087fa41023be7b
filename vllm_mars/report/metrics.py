"""In the server: the counts as Prometheus metrics beside vLLM's own, and a line in its log.

The metrics are made per engine and with the labels of vLLM's, in the classes that vLLM's stat
logger uses, so that several API servers add up and every engine has its own series.
"""

import functools
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

ALLOWED = "vllm:mars_max_loss_nats_per_token"
OVERRIDE = "vllm:mars_override"
INFO = "vllm:mars_info"

# Of the gauges; `COUNTERS` has the counters.
_HELP = {
    ALLOWED: "What an answer may lose per token, in nats: mars_max_loss of this server, or the "
    "larger one that requests may ask for.",
    OVERRIDE: "What VLLM_MARS_OVERRIDES holds new requests to, by option; NaN where it names none.",
    INFO: "1, with the version of vllm-mars, the option that names this server's rule, its value, "
    "whether that is lossy, and the loosest value that a request may ask for.",
}
# Relaxable positions without any gain after which the log warns. Were one in 200 gained, fewer than
# one server in 100 would come this far without.
INERT_AFTER = 1000
_LABELS = ("model_name", "engine")


class MarsProm:
    """The metrics of margin-aware verification of all engines that a front end sees.

    Args:
        layout: which count is what.
        engines: the values of the labels `model_name` and `engine`, by engine.
        config: the server's options.
        counter_class: vLLM's choice of a counter class, prometheus_client's or Ray's.
        gauge_class, histogram_class: the same of these.
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
        positions = range(layout.num_speculative_tokens)
        labels = {"position": [(str(it),) for it in positions], "reason": [(it,) for it in REASONS]}
        # By name and engine, a child for each entry.
        self._children: dict[str, dict[int, list[Any]]] = {}
        for name, (metric, text, by, _) in COUNTERS.items():
            if not metric or by == "bucket":
                continue
            counter = counter_class(
                name=metric, documentation=text, labelnames=[*_LABELS, *([by] if by else [])]
            )
            self._children[name] = {
                engine: [counter.labels(*whose, *value) for value in labels.get(by, [()])]
                for engine, whose in engines.items()
            }
        lost = COUNTERS["ended_lost"]
        histogram = histogram_class(
            name=lost.metric,
            documentation=lost.text,
            labelnames=list(_LABELS),
            buckets=list(BUCKETS),
        )
        self._request_lost = {e: histogram.labels(*whose) for e, whose in engines.items()}
        info = _gauge(gauge_class, INFO, "version", "rule", "value", "lossy", "limit")
        option: str = config.rule.option
        value: float | None = config.value
        limit = config.value
        if config.sets_price:
            option, value, limit = "mars_max_loss", config.max_loss, config.most_max_loss
        told = __version__, option, f"{value:g}", str(config.lossy).lower(), f"{limit:g}"
        for whose in engines.values():
            info.labels(*whose, *told).set(1)
        if config.most_max_loss < math.inf:
            allowed = _gauge(gauge_class, ALLOWED)
            for whose in engines.values():
                allowed.labels(*whose).set(config.most_max_loss)

    def observe(self, counts: list[int] | None, engine: int = 0) -> None:
        """Adds an increase of one engine's counts, if there is one."""
        if counts is None:
            return
        _check_length(counts, self._layout)
        for name, children in self._children.items():
            entries = counts[getattr(self._layout, name)]
            for child, count in zip(children[engine], entries, strict=True):
                if count:
                    child.inc(count * COUNTERS[name].unit)
        # The mean of a bucket's requests is in the bucket, and the sum of all stays exact.
        ended, lost = counts[self._layout.ended], counts[self._layout.ended_lost]
        for number, nats in zip(ended, lost, strict=True):
            for _ in range(number):
                self._request_lost[engine].observe(nats * UNIT / number)


class MarsLogging:
    """Sums the counts of an interval up for a line in the log.

    Once a server has verified many positions at which something could be gained and gained nothing,
    it warns, once: what was asked for is without effect, and nothing else would tell.

    Args:
        layout: which count is what.
    """

    def __init__(self, layout: CounterLayout) -> None:
        self._layout = layout
        self._counts = [0] * layout.size
        self._generated = 0
        # Since the server's start; the first is None once it has gained anything or warned.
        self._inert: list[int] | None = list(self._counts)

    def observe(self, counts: list[int] | None, generated: int) -> None:
        """Adds an increase of the counts, if there is one, and tokens."""
        self._generated += generated
        if counts is not None:
            _check_length(counts, self._layout)
            self._counts = add_counts(self._counts, counts)

    def log(self, logger: Any, prefix: str = "") -> None:
        """Logs the sums since the last call, or nothing if no position was verified.

        Args:
            logger: where to.
            prefix: what the line begins with.
        """
        counts, self._counts = self._counts, [0] * self._layout.size
        generated, self._generated = self._generated, 0
        verified = counts[self._layout.verified]
        if not any(verified):
            return
        layout = self._layout
        gained, lost, up, down = (
            sum(counts[entries]) * UNIT
            for entries in (layout.gained, layout.lost, layout.drift_up, layout.drift_down)
        )
        logger.info(
            "%sMARS metrics: Gained: %.1f draft tokens (%.1f%% of accepted), Lost: %.4f nats per "
            "token, Drift: %+.4f nats per token, Relaxed outright: %d tokens",
            prefix,
            gained,
            100 * share(gained, sum(counts[self._layout.accepted])),
            share(lost, generated),
            share(up - down, generated),
            sum(counts[self._layout.relaxed]),
        )
        self._warn_if_inert(counts, logger, prefix)

    def _warn_if_inert(self, counts: list[int], logger: Any, prefix: str) -> None:
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
            "URL` shows what a server does.",
            prefix,
            evidence,
            ", ".join(f"{reason} {count}" for reason, count in refused if count) or "none",
        )


def share(part: float, whole: float) -> float:
    """`part / whole`, and 0 where there is nothing."""
    return part / whole if whole else 0.0


def add_metrics(stat_logger: Any, config: MarsConfig) -> None:
    """Makes vLLM's Prometheus stat logger export the counts as well.

    Args:
        stat_logger: a `PrometheusStatLogger`, once built, of a server that asks for MARS. Its
            `record` is wrapped, on this instance alone.
        config: the server's options.
    """
    prom = MarsProm(
        CounterLayout(stat_logger.vllm_config.speculative_config.num_speculative_tokens),
        stat_logger.per_engine_labelvalues,
        config,
        stat_logger._counter_cls,
        stat_logger._gauge_cls,
        stat_logger._histogram_cls,
    )

    _observe_records(stat_logger, lambda counts, _, engine: prom.observe(counts, engine))
    if (overrides := overrides_of(config)) is not None:
        _add_override(stat_logger, config, overrides)


def _gauge(gauge_class: Any, name: str, *labels: str) -> Any:
    return gauge_class(
        name=name,
        documentation=_HELP[name],
        labelnames=[*_LABELS, *labels],
        # Or each API server would have a series of its own.
        multiprocess_mode="mostrecent",
    )


def _add_override(stat_logger: Any, config: MarsConfig, overrides: Overrides) -> None:
    """A gauge of what is in force."""
    gauge = _gauge(stat_logger._gauge_cls, OVERRIDE, "option")

    def show(options: Mapping[str, float]) -> None:
        for option in (config.rule.option, "mars_max_loss"):
            for whose in stat_logger.per_engine_labelvalues.values():
                gauge.labels(*whose, option).set(options.get(option, math.nan))

    overrides.observe(show)


def add_log_line(stat_logger: Any, config: MarsConfig) -> None:
    """Makes vLLM's logging stat logger log the counts as well, after its own lines.

    Args:
        stat_logger: a `LoggingStatLogger`, once built, of a server that asks for MARS. Its `record`
            and `log` are wrapped, on this instance alone.
        config: the server's options.
    """
    logging = MarsLogging(
        CounterLayout(stat_logger.vllm_config.speculative_config.num_speculative_tokens)
    )
    log = stat_logger.log

    @functools.wraps(log)
    def log_and_add() -> None:
        log()
        logging.log(_logger(), stat_logger.log_prefix)

    stat_logger.log = log_and_add
    _observe_records(stat_logger, lambda *observed: logging.observe(*observed[:2]))


def _observe_records(
    stat_logger: Any, observe: Callable[[list[int] | None, int, int], None]
) -> None:
    """Hands on what each record brings: counts or None, generated tokens, and the engine."""
    record = stat_logger.record
    names = "scheduler_stats", "iteration_stats"

    @functools.wraps(record)
    def record_and_observe(*args: Any, **kwargs: Any) -> None:
        record(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        report: EngineReport | None = found_on(given.get("scheduler_stats"))
        generated = getattr(given.get("iteration_stats"), "num_generation_tokens", 0)
        observe(report and report.counts, generated, given.get("engine_idx", 0))

    stat_logger.record = record_and_observe


def _check_length(counts: list[int], layout: CounterLayout) -> None:
    if len(counts) != layout.size:
        raise RuntimeError(
            f"{len(counts)} counts came from a worker, but {layout.size} were expected; install "
            "the same version of vllm-mars on every node."
        )


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.vllm_mars.report.metrics")


def drain_counts(engine: Any, _: MarsConfig) -> None:
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
            report: EngineReport | None = found_on(outputs.scheduler_stats)
            has_more = report is not None and report.has_more
        return outputs

    client.get_output = get_and_note
    engine.has_unfinished_requests = lambda: has_unfinished_requests() or has_more
