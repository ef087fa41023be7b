"""The counts in the front end: Prometheus metrics beside vLLM's own, and a line in its log.

The metrics are made per engine and with the labels of vLLM's, in the classes that vLLM's stat
logger uses, so that several API servers add up and every engine has its own series.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import prometheus_client

from vllm_mars.config import MarsConfig
from vllm_mars.engine.transport import add_counts
from vllm_mars.runner.counters import (
    LOSS_UNIT,
    RATIO_EDGES,
    RATIO_UNIT,
    REASONS,
    CounterLayout,
    layout_of,
)
from vllm_mars.runner.outputs import FIELD

RELAXED = "vllm:mars_relaxed_tokens"
VERIFIED = "vllm:mars_verified_positions"
LOW_MARGIN = "vllm:mars_low_margin_positions"
REFUSED = "vllm:mars_refused_positions"
LOST = "vllm:mars_lost_nats"
RATIO = "vllm:mars_logit_ratio"
SHADOW = "vllm:mars_shadow_accepted_tokens"

_HELP = {
    RELAXED: "Draft tokens accepted only by the margin, by position.",
    VERIFIED: "Draft positions looked at: up to and including the first rejected one, by position.",
    LOW_MARGIN: "Verified positions whose two largest logits are within the margin, by position.",
    REFUSED: "Verified positions that the margin would have relaxed, by what forbade it.",
    LOST: "What relaxed tokens lost against the target's first choices, in nats: "
    "the sum of log p(first choice) - log p(token).",
    RATIO: "Second largest logit over the largest at verified positions where that is positive.",
    SHADOW: "Draft tokens that verification with this threshold would have accepted, by position.",
}
# Low-margin positions without any relaxed token after which the log warns. Were one in 200 relaxed,
# fewer than one server in 100 would come this far without.
INERT_AFTER = 1000
_LABELS = ("model_name", "engine")


class BucketHistogram(prometheus_client.Histogram):
    """A histogram that is fed with counts per bucket instead of single values."""

    def add(self, counts: Sequence[int], total: float) -> None:
        """Adds observations, in one step per bucket.

        prometheus_client has no public way to add more than one at a time. These are the values
        that its `observe` adds to, also where several processes share them.

        Args:
            counts: new observations of each bucket, not cumulated.
            total: their sum.
        """
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(total)


class MarsProm:
    """The metrics of margin-aware verification of all engines that a front end sees.

    Args:
        layout: which count is what.
        engines: the values of the labels `model_name` and `engine`, by engine.
        counter_class: vLLM's choice of a counter class, prometheus_client's or Ray's.
        histogram_class: the same of a histogram class. Only prometheus_client's can be fed with
            counts; with another there is no histogram, and the log says so once.
    """

    def __init__(
        self,
        layout: CounterLayout,
        engines: dict[int, list[object]],
        counter_class: Any = prometheus_client.Counter,
        histogram_class: Any = prometheus_client.Histogram,
    ) -> None:
        self._layout = layout
        self._counters: list[tuple[slice, float, dict[int, list[Any]]]] = []

        def add(
            name: str, entries: slice, labels: Mapping[str, Iterable[object]], unit: float = 1
        ) -> None:
            """A counter with a child for each entry, by the values of its labels."""
            counter = counter_class(
                name=name, documentation=_HELP[name], labelnames=[*_LABELS, *labels]
            )
            values = [tuple(map(str, value)) for value in itertools.product(*labels.values())]
            children = {
                engine: [counter.labels(*whose, *value) for value in values]
                for engine, whose in engines.items()
            }
            self._counters.append((entries, unit, children))

        by_position = {"position": range(layout.num_speculative_tokens)}
        add(RELAXED, layout.relaxed, by_position)
        add(VERIFIED, layout.verified, by_position)
        add(LOW_MARGIN, layout.low_margin, by_position)
        add(REFUSED, layout.refused, {"reason": REASONS})
        add(LOST, layout.lost, {}, LOSS_UNIT)
        if layout.shadowed:
            thresholds = [f"{value:g}" for value in layout.shadowed]
            add(SHADOW, layout.shadow, {layout.rule: thresholds, **by_position})
        self._histograms: dict[int, Any] = {}
        if issubclass(histogram_class, prometheus_client.Histogram):
            histogram = BucketHistogram(
                name=RATIO,
                documentation=_HELP[RATIO],
                buckets=RATIO_EDGES,
                labelnames=_LABELS,
            )
            self._histograms = {
                engine: histogram.labels(*labels) for engine, labels in engines.items()
            }
        else:
            _logger().warning_once(
                "%s is not exported: a %s cannot be fed with counts.",
                RATIO,
                histogram_class.__name__,
            )

    def observe(self, counts: list[int], engine: int = 0) -> None:
        """Adds an increase of one engine's counts."""
        _check_length(counts, self._layout)
        for entries, unit, children in self._counters:
            for child, count in zip(children[engine], counts[entries], strict=True):
                if count:
                    child.inc(count * unit)
        if self._histograms:
            (units,) = counts[self._layout.ratio_sum]
            self._histograms[engine].add(counts[self._layout.ratio], units * RATIO_UNIT)


class MarsLogging:
    """Sums the counts of an interval up for a line in the log.

    Once a server has verified many low-margin positions and relaxed none, it warns, once: what was
    asked for is without effect, and nothing else would tell.

    Args:
        layout: which count is what.
    """

    def __init__(self, layout: CounterLayout) -> None:
        self._layout = layout
        self._counts = [0] * layout.size
        self._generated = 0
        # Since the server's start; None once it has relaxed a token or warned, and in shadow mode.
        self._unrelaxed: list[int] | None = None if layout.shadowed else list(self._counts)

    def observe(self, counts: list[int] | None, generated: int) -> None:
        """Adds an increase of the counts, if there is one, and of the generated tokens."""
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
        verified, relaxed = counts[self._layout.verified], counts[self._layout.relaxed]
        if not any(verified):
            return
        logger.info(
            "%sMARS metrics: Relaxed: %d tokens (%.1f%% of accepted), Lost: %.4f nats per token, "
            "Low margin: %.1f%% of verified positions, Per-position relaxed rate: %s",
            prefix,
            sum(relaxed),
            100 * share(sum(relaxed), sum(counts[self._layout.accepted])),
            share(sum(counts[self._layout.lost]) * LOSS_UNIT, generated),
            100 * share(sum(counts[self._layout.low_margin]), sum(verified)),
            ", ".join(f"{share(r, v):.3f}" for r, v in zip(relaxed, verified, strict=True)),
        )
        self._warn_if_inert(counts, logger, prefix)

    def _warn_if_inert(self, counts: list[int], logger: Any, prefix: str) -> None:
        if self._unrelaxed is None:
            return
        if any(counts[self._layout.relaxed]):
            self._unrelaxed = None
            return
        self._unrelaxed = add_counts(self._unrelaxed, counts)
        low_margin = sum(self._unrelaxed[self._layout.low_margin])
        if low_margin < INERT_AFTER:
            return
        refused = zip(REASONS, self._unrelaxed[self._layout.refused], strict=True)
        self._unrelaxed = None
        logger.warning(
            "%sMARS has relaxed none of %d low-margin positions since the server's start, so it "
            "has had no effect. Refusals: %s. `vllm-mars doctor URL` shows what a server does.",
            prefix,
            low_margin,
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
        layout_of(config, stat_logger.vllm_config.speculative_config),
        stat_logger.per_engine_labelvalues,
        stat_logger._counter_cls,
        stat_logger._histogram_cls,
    )

    def observe(counts: list[int] | None, generated: int, engine: int) -> None:
        if counts is not None:
            prom.observe(counts, engine)

    _observe_records(stat_logger, observe)


def add_log_line(stat_logger: Any, config: MarsConfig) -> None:
    """Makes vLLM's logging stat logger log the counts as well, after its own lines.

    Args:
        stat_logger: a `LoggingStatLogger`, once built, of a server that asks for MARS. Its `record`
            and `log` are wrapped, on this instance alone.
        config: the server's options.
    """
    logging = MarsLogging(layout_of(config, stat_logger.vllm_config.speculative_config))
    log = stat_logger.log

    @functools.wraps(log)
    def log_and_add() -> None:
        log()
        logging.log(_logger(), stat_logger.log_prefix)

    stat_logger.log = log_and_add
    _observe_records(stat_logger, lambda counts, generated, _: logging.observe(counts, generated))


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
        counts = getattr(given.get("scheduler_stats"), FIELD, None)
        generated = getattr(given.get("iteration_stats"), "num_generation_tokens", 0)
        observe(counts, generated, given.get("engine_idx", 0))

    stat_logger.record = record_and_observe


def _check_length(counts: list[int], layout: CounterLayout) -> None:
    if len(counts) != layout.size:
        raise RuntimeError(
            f"{len(counts)} counts came from a worker, but {layout.size} were expected; install "
            "the same version of vllm-mars on every node."
        )


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.vllm_mars.engine.metrics")
