"""The counters in vLLM's loggers: /metrics, the log line, the dashboard."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import prometheus_client
import pytest

from counts import (
    COUNTS,
    DOCS,
    GAINED,
    LAYOUT,
    LOST,
    REFUSED,
    RELAXED,
    REQUEST_LOST,
    VERIFIED,
    check_exported,
    counts_of,
    dashboard_queries,
    exported,
    in_promql,
    page_queries,
    promtool,
)
from engines import MARS, NGRAM, engine_config
from vllm_mars import __version__
from vllm_mars.kernels.counters.table import BUCKETS, COUNTERS, CounterLayout
from vllm_mars.options.config import MarsConfig
from vllm_mars.report import metrics
from vllm_mars.report.carrier import EngineReport, put

pytestmark = pytest.mark.usefixtures("clean_registry")

NAMES = {RELAXED, VERIFIED, REFUSED, LOST, GAINED}
NAMES |= {metrics.ALLOWED, metrics.INFO, f"{REQUEST_LOST}_bucket"}
BOUND = MarsConfig(max_loss=0.02)


def test_all_series_exist_before_the_first_count():
    metrics.MarsProm(LAYOUT, {0: ["m", "0"]}, BOUND)
    samples = exported()
    assert samples.pop((metrics.ALLOWED, "0")) == 0.02
    # Values of the labels engine, limit, lossy, rule, value and version.
    info = (metrics.INFO, "0", "0.02", "true", "mars_max_loss", "0.02", __version__)
    assert samples.pop(info) == 1
    entries = [
        entry
        for name, counter in COUNTERS.items()
        if counter.metric and counter.by != "bucket"
        for entry in COUNTS[getattr(LAYOUT, name)]
    ]
    assert len(samples) == len(entries) + len(BUCKETS) + 3
    assert not any(samples.values())


OBSERVE = """
import json, sys
from vllm_mars.kernels.counters.table import CounterLayout
from vllm_mars.options.config import MarsConfig
from vllm_mars.report.metrics import MarsProm
counts = json.loads(sys.argv[1])
prom = MarsProm(CounterLayout(3), {0: ["m", "0"], 1: ["m", "1"]}, MarsConfig(max_loss=0.02))
prom.observe(counts, 0)
prom.observe(counts, 1)
prom.observe(None, 1)
prom.observe(counts, 1)
"""


def test_api_servers_in_several_processes_add_up(tmp_path, monkeypatch):
    """vLLM uses prometheus_client's multiprocess mode with several API servers."""
    from prometheus_client import multiprocess

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for _ in range(2):
        subprocess.run([sys.executable, "-c", OBSERVE, json.dumps(COUNTS)], check=True, timeout=120)
    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    samples = exported(registry)
    check_exported(samples, "0", 2)
    check_exported(samples, "1", 4)
    assert samples[metrics.ALLOWED, "0"] == samples[metrics.ALLOWED, "1"] == 0.02


@pytest.fixture
def log(monkeypatch):
    """Lines and warnings of the log."""
    lines, warnings = [], []
    for name, messages in (("info", lines), ("warning", warnings)):
        monkeypatch.setattr(
            metrics.logger, name, lambda text, *args, to=messages: to.append(text % args)
        )
    return SimpleNamespace(lines=lines, warnings=warnings)


def test_log_line(log):
    logging = metrics.MarsLogging(LAYOUT)
    logging.log()
    logging.observe(COUNTS, 20)
    logging.observe(None, 10)
    logging.observe(COUNTS, 30)
    logging.log("Engine 000: ")
    logging.log()
    assert log.lines == [
        "Engine 000: MARS metrics: Gained: 4.5 draft tokens (20.5% of accepted), "
        "Lost: 0.0500 nats per token, Drift: +0.0083 nats per token, Relaxed outright: 6 tokens"
    ]


def test_a_server_that_gains_nothing_warns_once(log):
    verified = {"verified": [300, 150, 49]}
    many = counts_of(**verified, relaxable=[499], refused=[4, 0, 0, 2])
    logging = metrics.MarsLogging(LAYOUT)
    for counts in (counts_of(**verified), counts_of(**verified), many, many):
        logging.observe(counts, 600)
        logging.log()
    assert log.warnings == [], "positions of strict requests do not count"
    logging.observe(counts_of(verified=[2], relaxable=[2]), 1)
    logging.log("Engine 000: ")
    assert log.warnings == [
        "Engine 000: MARS has gained nothing at 1000 verified positions of requests that are not "
        "strict since the server's start, so it has had no effect. Refusals: protected 8, "
        "repeat 4. `vllm-mars doctor URL` checks a running server."
    ]
    for _ in range(3):
        logging.observe(many, 600)
        logging.log()
    assert len(log.warnings) == 1


def test_another_layout_is_an_error():
    with pytest.raises(RuntimeError, match="install the same version of vllm-mars on every"):
        metrics.MarsProm(CounterLayout(4), {0: ["m", "0"]}, BOUND).observe(COUNTS)


@pytest.fixture
def manager(packaged_model):
    """Builds vLLM's stat loggers for a speculative config."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    def build(speculative_config, **options):
        speculative_config = {**speculative_config, "num_speculative_tokens": 3}
        return StatLoggerManager(engine_config(packaged_model, speculative_config), **options)

    return build


@pytest.mark.parametrize("aggregate", [False, True])
def test_vllms_stat_loggers_export_and_log(manager, log, aggregate):
    from vllm.v1.metrics.stats import SchedulerStats

    loggers = manager(MARS, engine_idxs=[0, 1], aggregate_engine_logging=aggregate)
    stats = SchedulerStats()
    put(stats, EngineReport(COUNTS, has_more=False))
    for engine in (0, 1, 1):
        loggers.record(stats, None, engine_idx=engine)
    loggers.record(None, None, engine_idx=0)
    samples = exported()
    check_exported(samples, "0", 1)
    check_exported(samples, "1", 2)

    loggers.log()
    prefixes = [line.split("MARS metrics: ")[0] for line in log.lines]
    assert prefixes == (
        ["2 Engines Aggregated: "] if aggregate else ["Engine 000: ", "Engine 001: "]
    )
    assert f"Relaxed outright: {9 if aggregate else 6} tokens" in log.lines[-1]


def test_a_server_without_mars_exports_only_vllms_metrics(manager, monkeypatch):
    from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger

    loggers = manager(NGRAM)
    assert exported() == {}
    for logger in loggers.stat_loggers:
        assert not {"record", "log"} & vars(logger).keys()
    manager(MARS)
    assert exported()
    assert LoggingStatLogger.record.__module__ == PrometheusStatLogger.record.__module__


# vLLM's metrics on the dashboard.
OF_VLLM = {
    "vllm:generation_tokens_total",
    "vllm:request_generation_tokens_count",
    "vllm:request_generation_tokens_sum",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:spec_decode_num_drafts_total",
}


def names_in(expression):
    """Metrics in an expression, by vLLM's names; Ray Serve renames them."""
    return {f"vllm:{name}" for name in re.findall(r"vllm[:.]([a-z0-9]\w+)", expression)}


def test_the_dashboard_and_the_page_query_exported_metrics():
    metrics.MarsProm(CounterLayout(3), {0: ["m", "0"]}, BOUND)
    ours = {name for name, *_ in exported()}
    on_dashboard = set().union(*map(names_in, dashboard_queries()))
    on_page = names_in((DOCS / "operating.md").read_text())
    assert on_dashboard | on_page <= ours | OF_VLLM | {metrics.OVERRIDE, REQUEST_LOST}
    assert {name.removesuffix("_total") for name in on_dashboard} >= NAMES
    assert {name.removesuffix("_total") for name in on_page} >= NAMES


def test_promtool_parses_the_queries(tmp_path):
    queries = [*dashboard_queries(), *page_queries()]
    rules = [{"record": f"q{i}", "expr": in_promql(query)} for i, query in enumerate(queries)]
    file = tmp_path / "rules.yml"
    # JSON is valid YAML.
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", file)
