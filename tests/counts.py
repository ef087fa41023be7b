"""Counts of an invented step, their metrics, and the queries of pages and dashboard."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import prometheus_client
import pytest

from vllm_mars.kernels.counters.table import COUNTERS, REASONS, CounterLayout

LAYOUT = CounterLayout(3)
RELAXED, VERIFIED, ACCEPTED, RELAXABLE, REFUSED = (
    COUNTERS[name].metric for name in ("relaxed", "verified", "accepted", "relaxable", "refused")
)
LOST, GAINED, DRIFT_UP, DRIFT_DOWN, REQUEST_LOST = (
    COUNTERS[name].metric for name in ("lost", "gained", "drift_up", "drift_down", "ended_lost")
)
DOCS = Path(__file__).parents[1] / "docs"


def counts_of(**entries):
    """Returns a vector with these entries; others are 0."""
    counts = [0] * LAYOUT.size
    for name, values in entries.items():
        begin = getattr(LAYOUT, name).start
        counts[begin : begin + len(values)] = values
    return counts


COUNTS = counts_of(
    verified=[10, 6, 3],
    accepted=[6, 3, 2],
    relaxed=[2, 1, 0],
    lost=[3 << 15],
    gained=[9 << 14],
    drift_up=[1 << 15],
    drift_down=[1 << 14],
    relaxable=[17],
    refused=[4, 0, 1, 0, 2],
    # One request lost nothing, and three lost 1 nat in total.
    ended=[1, 0, 0, 3],
    ended_lost=[0, 0, 0, 1 << 16],
)


def exported(registry=prometheus_client.REGISTRY):
    """Returns values of this project's metrics by name and labels other than the model."""
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "model_name")): (
            sample.value
        )
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("vllm:mars_") and not sample.name.endswith("_created")
    }


def check_exported(samples, engine, times):
    assert samples[f"{RELAXABLE}_total", engine] == times * 17
    for name, entry in ((RELAXED, "relaxed"), (VERIFIED, "verified"), (ACCEPTED, "accepted")):
        for position, count in enumerate(COUNTS[getattr(LAYOUT, entry)]):
            assert samples[f"{name}_total", engine, str(position)] == times * count
    for reason, count in zip(REASONS, COUNTS[LAYOUT.refused], strict=True):
        assert samples[f"{REFUSED}_total", engine, reason] == times * count
    assert samples[f"{LOST}_total", engine] == times * 1.5
    assert samples[f"{GAINED}_total", engine] == times * 2.25
    assert samples[f"{DRIFT_UP}_total", engine] == times * 0.5
    assert samples[f"{DRIFT_DOWN}_total", engine] == times * 0.25
    for most, count in (("0.0625", 1), ("0.25", 1), ("0.5", 4), ("+Inf", 4)):
        assert samples[f"{REQUEST_LOST}_bucket", engine, most] == times * count
    assert samples[f"{REQUEST_LOST}_sum", engine] == pytest.approx(times)


def dashboard_queries():
    dashboard = json.loads((DOCS / "grafana-mars.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def page_queries():
    blocks = re.findall(r"```promql\n(.*?)\n```", (DOCS / "operating.md").read_text(), re.S)
    # An indented line continues the line before.
    parts = [part for block in blocks for part in re.split(r"\n(?! )", block)]
    return [part for part in parts if not part.startswith("#")]


def in_promql(query):
    """Fills in Grafana's variables: all models, the last minute."""
    return query.replace("$model_name", ".*").replace("$__rate_interval", "1m")


def promtool(*arguments):
    """Runs `promtool`; skips the test if it is missing."""
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on PATH: apt install prometheus")
    check = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr
    return check.stdout
