"""Counts on their way from the worker to /metrics and the log, over vLLM's own wire."""

import copy
import dataclasses
import json
import pickle
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import openai
import prometheus_client
import pytest
import torch

from vllm_mars import MarsConfig, metrics
from vllm_mars.counters import RATIO_EDGES, RATIO_UNIT, REASONS, CounterLayout, Counters
from vllm_mars.margin import MarginRule
from vllm_mars.metrics_transport import (
    FIELD,
    carrier_of,
    carry_counts,
    declare_field,
    report,
    with_counts,
)
from vllm_mars.server import VllmServer

LAYOUT = CounterLayout(3)
NAMES = (
    metrics.RELAXED,
    metrics.VERIFIED,
    metrics.LOW_MARGIN,
    metrics.REFUSED,
    metrics.RATIO,
)


def counts_of(**entries):
    """A vector with these entries, each name's in their order."""
    counts = [0] * LAYOUT.size
    for name, values in entries.items():
        counts[getattr(LAYOUT, name)] = values
    return counts


COUNTS = counts_of(
    verified=[10, 6, 3],
    accepted=[6, 3, 2],
    relaxed=[2, 1, 0],
    low_margin=[5, 3, 1],
    ratio=[1, *[0] * 8, 9, *[0] * 4, 8, 0],
    ratio_sum=[int(16.0 / RATIO_UNIT)],
    refused=[4, 0, 1, 0],
)


@pytest.fixture(autouse=True)
def no_metrics_left():
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def exported(registry=prometheus_client.REGISTRY):
    """Samples of this project's metrics: name and labels other than the model -> value."""
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "model_name")): (
            sample.value
        )
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("vllm:mars_") and not sample.name.endswith("_created")
    }


def check_exported(samples, engine, times):
    """Whether the samples of an engine are `times` the counts of `COUNTS`."""
    for name, entry in (
        (metrics.RELAXED, "relaxed"),
        (metrics.VERIFIED, "verified"),
        (metrics.LOW_MARGIN, "low_margin"),
    ):
        for position, count in enumerate(COUNTS[getattr(LAYOUT, entry)]):
            assert samples[f"{name}_total", engine, str(position)] == times * count
    for reason, count in zip(REASONS, COUNTS[LAYOUT.refused], strict=True):
        assert samples[f"{metrics.REFUSED}_total", engine, reason] == times * count
    below = 0
    for edge, count in zip([*RATIO_EDGES, float("inf")], COUNTS[LAYOUT.ratio], strict=True):
        below += times * count
        le = "+Inf" if edge == float("inf") else str(edge)
        assert samples[f"{metrics.RATIO}_bucket", engine, le] == below
    assert samples[f"{metrics.RATIO}_count", engine] == below == times * 18
    assert samples[f"{metrics.RATIO}_sum", engine] == times * 16


def test_metrics_of_each_engine():
    prom = metrics.MarsProm(LAYOUT, {0: ["m", "0"], 1: ["m", "1"]})
    prom.observe(COUNTS)
    prom.observe(COUNTS, engine=1)
    prom.observe(COUNTS, engine=1)
    samples = exported()
    check_exported(samples, "0", 1)
    check_exported(samples, "1", 2)


def test_all_series_are_there_before_anything_is_counted():
    metrics.MarsProm(LAYOUT, {0: ["m", "0"]})
    samples = exported()
    assert len(samples) == 3 * 3 + len(REASONS) + len(RATIO_EDGES) + 1 + 2
    assert not any(samples.values())


OBSERVE = """
import json, sys
from vllm_mars.counters import CounterLayout
from vllm_mars.metrics import MarsProm
counts = json.loads(sys.argv[1])
prom = MarsProm(CounterLayout(3), {0: ["m", "0"], 1: ["m", "1"]})
prom.observe(counts, 0)
prom.observe(counts, 1)
prom.observe(counts, 1)
"""


def test_api_servers_in_several_processes_add_up(tmp_path, monkeypatch):
    """prometheus_client's multiprocess mode, which vLLM takes with several API servers."""
    from prometheus_client import multiprocess

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for _ in range(2):
        subprocess.run([sys.executable, "-c", OBSERVE, json.dumps(COUNTS)], check=True, timeout=120)
    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    samples = exported(registry)
    check_exported(samples, "0", 2)
    check_exported(samples, "1", 4)


def test_a_histogram_that_cannot_be_fed_is_said_once(monkeypatch):
    """Ray's, which takes single values only."""
    import vllm.logger

    said = []

    class Logger:
        def warning_once(self, message, *args):
            said.append(message % args)

    class RayHistogramWrapper:
        pass

    monkeypatch.setattr(vllm.logger, "init_logger", lambda name: Logger())
    prom = metrics.MarsProm(LAYOUT, {0: ["m", "0"]}, histogram_class=RayHistogramWrapper)
    prom.observe(COUNTS)
    assert said == [
        "vllm:mars_logit_ratio is not exported: a RayHistogramWrapper cannot be fed with counts."
    ]
    assert exported()[f"{metrics.VERIFIED}_total", "0", "0"] == 10


class Log:
    def __init__(self):
        self.lines = []

    def info(self, message, *args):
        self.lines.append(message % args)


def test_log_line():
    log, logging = Log(), metrics.MarsLogging(LAYOUT)
    logging.log(log)
    logging.observe(COUNTS)
    logging.observe(COUNTS)
    logging.log(log, "Engine 000: ")
    logging.log(log)
    assert log.lines == [
        "Engine 000: MARS metrics: Relaxed: 6 tokens (27.3% of accepted), "
        "Low margin: 47.4% of verified positions, "
        "Per-position relaxed rate: 0.200, 0.167, 0.000"
    ]


def test_other_layouts_are_noticed():
    with pytest.raises(AssertionError, match="do all nodes run the same vllm-mars"):
        metrics.MarsProm(CounterLayout(4), {0: ["m", "0"]}).observe(COUNTS)


def runner_output(**fields):
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(**{"req_ids": ["a"], "req_id_to_index": {"a": 0}, **fields})


class Runner:
    """Stands in for a model runner: `sampled` and `executed` are what it returns."""

    speculative_config = SimpleNamespace(num_speculative_tokens=3)
    device = torch.device("cpu")

    def __init__(self):
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        self.sampled = None
        self.executed = EMPTY_MODEL_RUNNER_OUTPUT

    def execute_model(self, scheduler_output):
        return self.executed

    def sample_tokens(self, grammar_output):
        return self.sampled


@pytest.fixture
def on_rank(monkeypatch):
    import vllm.distributed

    def set_rank(rank):
        monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_rank", lambda: rank)

    return set_rank


def test_counts_leave_with_the_outputs_of_steps(on_rank):
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    on_rank(0)
    runner = Runner()
    rule = MarginRule(MarsConfig(), [])
    report(runner, rule)
    counters = rule.counters
    # vLLM's memory profiling.
    counters.device_counts += 7
    runner.sampled = runner_output()
    assert runner.sample_tokens(None) is runner.sampled
    assert not hasattr(runner.sampled, FIELD)
    counters.device_counts += torch.tensor(COUNTS)
    assert getattr(runner.sample_tokens(None), FIELD) == COUNTS

    # Nothing is lost where a step has no output of its own, and nothing lands in the shared one.
    counters.device_counts += torch.tensor(COUNTS)
    for shared in (None, EMPTY_MODEL_RUNNER_OUTPUT):
        runner.sampled = shared
        assert runner.sample_tokens(None) is shared
    last = runner.execute_model(None)
    assert getattr(last, FIELD) == COUNTS
    assert dataclasses.astuple(last) == dataclasses.astuple(EMPTY_MODEL_RUNNER_OUTPUT)
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, FIELD)
    assert runner.execute_model(None) is EMPTY_MODEL_RUNNER_OUTPUT
    assert getattr(pickle.loads(pickle.dumps(last)), FIELD) == COUNTS


def test_only_a_step_without_tokens_flushes(on_rank):
    counters = Counters(LAYOUT, torch.device("cpu"))
    counters.device_counts += 1
    for output in (None, runner_output(), torch.zeros(1)):
        assert with_counts(output, counters) is output
        assert not hasattr(output, FIELD)
    assert getattr(with_counts(runner_output(req_ids=[]), counters), FIELD)[0] == 1


def test_other_ranks_do_not_count(on_rank):
    on_rank(1)
    runner = Runner()
    rule = MarginRule(MarsConfig(), [])
    report(runner, rule)
    assert rule.counters is None
    runner.sampled = runner_output()
    runner.sample_tokens(None)
    assert not hasattr(runner.sampled, FIELD)


def test_asynchronous_outputs_carry_the_counts():
    """Both runners' classes, built without the CUDA stream that their constructors need."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    for kind, name in (
        (AsyncGPUModelRunnerOutput, "_model_runner_output"),
        (AsyncOutput, "model_runner_output"),
    ):
        pending, output = kind.__new__(kind), runner_output()
        setattr(pending, name, output)
        assert carrier_of(pending) is output


class Scheduler:
    """Stands in for vLLM's scheduler."""

    log_stats = True

    def update_from_output(self, scheduler_output, model_runner_output):
        return self.make_stats(None)

    def make_stats(self, spec_decoding_stats=None):
        from vllm.v1.metrics.stats import SchedulerStats

        return SchedulerStats() if self.log_stats else None


def test_the_scheduler_passes_the_counts_on():
    scheduler = Scheduler()
    carry_counts(scheduler)

    def step(increase=None):
        output = runner_output()
        if increase is not None:
            setattr(output, FIELD, increase)
        stats = scheduler.update_from_output(None, output)
        assert not hasattr(output, FIELD)
        return stats and getattr(stats, FIELD)

    assert step() is None
    assert step(COUNTS) == COUNTS
    assert step() is None
    scheduler.log_stats = False
    assert step([1] * LAYOUT.size) is None
    assert step(COUNTS) is None
    scheduler.log_stats = True
    assert step() == [count + 1 for count in COUNTS]


@pytest.fixture
def wire():
    """Sends statistics as the engine core does and returns what a front end decodes."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    declare_field(SchedulerStats)
    declare_field(SchedulerStats)

    def send(stats):
        message = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
        return MsgpackDecoder(EngineCoreOutputs).decode(message).scheduler_stats

    return send


def test_counts_survive_the_wire(wire):
    from vllm.v1.metrics.stats import SchedulerStats

    stats = SchedulerStats(num_running_reqs=2)
    assert getattr(wire(stats), FIELD) is None
    setattr(stats, FIELD, COUNTS)
    received = wire(stats)
    assert getattr(received, FIELD) == COUNTS
    assert received == stats
    # What the dataclass can do otherwise, it still can.
    assert dataclasses.replace(SchedulerStats(), num_running_reqs=2) == stats
    assert getattr(copy.copy(received), FIELD) == COUNTS


MESSAGE = """
import vllm.plugins
vllm.plugins.load_general_plugins()
import vllm.v1.metrics.loggers
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackEncoder
outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(), timestamp=1.0)
print(hasattr(SchedulerStats, "mars_counts"), MsgpackEncoder().encode(outputs)[0].hex())
"""


def test_a_server_without_mars_sends_the_same_bytes(monkeypatch):
    def message(plugins):
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        command = [sys.executable, "-c", MESSAGE]
        output = subprocess.run(command, capture_output=True, text=True, timeout=240).stdout
        return output.splitlines()[-1].split()

    (declared, with_plugin), (undeclared, without) = message("mars"), message("none")
    assert (declared, undeclared) == ("True", "False")
    assert with_plugin == without


NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
MARS = {**NGRAM, "rejection_sample_method": "mars"}


@pytest.fixture
def manager(packaged_model):
    """Builds vLLM's stat loggers for a speculative config."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.metrics.loggers import StatLoggerManager

    load_general_plugins()

    def build(speculative_config, **options):
        config = EngineArgs(
            model=str(packaged_model),
            dtype="float32",
            max_model_len=512,
            speculative_config=speculative_config,
        ).create_engine_config()
        return StatLoggerManager(config, **options)

    return build


@pytest.mark.parametrize("aggregate", [False, True])
def test_vllms_stat_loggers_export_and_log(manager, monkeypatch, aggregate):
    from vllm.v1.metrics.stats import SchedulerStats

    loggers = manager(MARS, engine_idxs=[0, 1], aggregate_engine_logging=aggregate)
    stats = SchedulerStats()
    setattr(stats, FIELD, COUNTS)
    for engine in (0, 1, 1):
        loggers.record(stats, None, engine_idx=engine)
    loggers.record(None, None, engine_idx=0)
    samples = exported()
    check_exported(samples, "0", 1)
    check_exported(samples, "1", 2)

    log = Log()
    monkeypatch.setattr(metrics, "_logger", lambda: log)
    loggers.log()
    prefixes = [line.split("MARS metrics: ")[0] for line in log.lines]
    assert prefixes == (
        ["2 Engines Aggregated: "] if aggregate else ["Engine 000: ", "Engine 001: "]
    )
    assert ("Relaxed: 9 tokens" if aggregate else "Relaxed: 6 tokens") in log.lines[-1]


def test_a_server_without_mars_has_no_other_metrics(manager, monkeypatch):
    from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger

    loggers = manager(NGRAM)
    assert exported() == {}
    for logger in loggers.stat_loggers:
        assert not {"record", "log"} & vars(logger).keys()
    manager(MARS)
    assert exported()
    assert LoggingStatLogger.record.__module__ == PrometheusStatLogger.record.__module__


DASHBOARD = Path(__file__).parent.parent / "docs/grafana-mars.json"
# What vLLM exports and the dashboard takes as well.
OF_VLLM = {
    "vllm:generation_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:spec_decode_num_drafts_total",
}


def names_in(expression):
    return set(re.findall(r"vllm:[a-z0-9_]+", expression))


def test_the_dashboard_and_the_page_ask_for_what_is_exported():
    metrics.MarsProm(CounterLayout(3, (0.9,)), {0: ["m", "0"]})
    ours = {name for name, *_ in exported()}
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    asked = set().union(*map(names_in, expressions))
    assert asked <= ours | OF_VLLM
    assert {name.removesuffix("_bucket").removesuffix("_total") for name in asked} >= set(NAMES)
    page = (DASHBOARD.parent / "metrics.md").read_text()
    assert names_in(page) <= ours | OF_VLLM | {metrics.RATIO}
    told = {name.removesuffix("_total") for name in names_in(page)}
    assert {*NAMES, metrics.SHADOW} <= told


PROMPTS = [
    "Repeat this sentence three times: The rain in Spain stays mainly in the plain.",
    "Write a Python function that returns the sum of a list of numbers, then call it twice.",
    "List the days of the week, one on each line, with the word 'day' after each of them.",
    "Explain in three sentences why the sky is blue.",
]


def serve(model, log, *arguments, interval="1"):
    return VllmServer(
        model,
        [
            *("--enforce-eager", "--dtype", "float32", "--max-model-len", "512"),
            *("--served-model-name", "model", "--speculative-config", json.dumps(MARS)),
            *arguments,
        ],
        log_path=log,
        env={"VLLM_LOG_STATS_INTERVAL": interval},
    )


def ask_all(server, theta=None):
    """Answers all prompts at once and returns by how much the metrics rose."""
    before = server.metrics()
    extra = {"vllm_xargs": {"mars_theta": theta}} if theta else {}
    with (
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):

        def ask(prompt):
            client.chat.completions.create(
                model="model",
                messages=[{"role": "user", "content": prompt}],
                temperature=0,
                max_tokens=48,
                extra_body=extra,
            )

        list(pool.map(ask, PROMPTS))
    # The step that ends the last request comes after its answer.
    for _ in range(20):
        time.sleep(0.5)
        after = server.metrics()
        if after[VERIFIED_FIRST] - before[VERIFIED_FIRST] == after[DRAFTS] - before[DRAFTS]:
            break
    return {name: value - before.get(name, 0) for name, value in after.items()}


VERIFIED_FIRST = f'{metrics.VERIFIED}_total{{position="0"}}'
DRAFTS = "vllm:spec_decode_num_drafts_total"


def check_increase(rise):
    """Whether the counts of this project and of vLLM tell the same story."""

    def of_positions(name):
        return [rise[f'{name}_total{{position="{position}"}}'] for position in range(3)]

    verified, relaxed = of_positions(metrics.VERIFIED), of_positions(metrics.RELAXED)
    low_margin = of_positions(metrics.LOW_MARGIN)
    accepted = of_positions("vllm:spec_decode_num_accepted_tokens_per_pos")
    assert verified[0] == rise[DRAFTS] > 0
    # Every accepted draft token but a request's last has the next position verified.
    assert all(after <= before for before, after in zip(accepted, verified[1:], strict=False))
    assert all(a <= v for a, v in zip(accepted, verified, strict=True))
    assert all(r <= min(a, m) for r, a, m in zip(relaxed, accepted, low_margin, strict=True))
    observed = rise[f"{metrics.RATIO}_count"]
    assert 0.9 * sum(verified) <= observed <= sum(verified)
    assert 0 < rise[f"{metrics.RATIO}_sum"] <= observed
    return sum(relaxed), sum(low_margin)


@pytest.mark.engine
def test_a_real_server_counts_exports_and_logs(packaged_model, tmp_path):
    log = tmp_path / "server.log"
    with serve(packaged_model, log) as server:
        relaxed, _ = check_increase(ask_all(server))
        assert relaxed > 0
        assert check_increase(ask_all(server, theta=1)) == (0, 0)
    lines = re.findall(r"Engine 000: MARS metrics: Relaxed: (\d+) tokens", log.read_text())
    assert sum(map(int, lines)) == relaxed


@pytest.mark.engine
def test_several_api_servers_add_up(packaged_model, tmp_path):
    with serve(packaged_model, tmp_path / "server.log", "--api-server-count", "2") as server:
        for _ in range(2):
            relaxed, _ = check_increase(ask_all(server))
            assert relaxed > 0
