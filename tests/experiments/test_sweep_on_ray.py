"""A sweep's cells on a Ray cluster of two nodes: spread, one node lost, what is refused at once."""

import collections
import dataclasses
import time

import pytest

from clusters import cluster
from processes import MARK, marked, wait_until

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

from vllm_mars.cli import main
from vllm_mars.experiments.sweep.datasets import load_dataset
from vllm_mars.experiments.sweep.plan import Sweep, SweepOptions, plan
from vllm_mars.experiments.sweep.ray_cells import RayRunner
from vllm_mars.experiments.sweep.record_file import read_cells

# Each test starts Ray clusters.
pytestmark = pytest.mark.nightly
MARK_VALUE = "sweep"


@pytest.fixture
def options(tmp_path):
    """Of a grid of 24 cells in 8 groups, so that a lost node leaves groups half done."""
    return SweepOptions(
        model=str(tmp_path),
        methods=("autoregressive", "standard"),
        temperatures=(0.0, 0.5, 1.0),
        concurrencies=(1,),
        repeats=4,
        num_prompts=1,
    )


def sweep_of(options):
    datasets = tuple(load_dataset(name, options.num_prompts) for name in options.datasets)
    return Sweep(options, options.model, datasets)


@pytest.mark.parametrize(
    ("resources", "node", "message"),
    [
        pytest.param(
            {"num_gpus": 2},
            "a",
            "a cell needs 4 GPUs .* but the largest node of this cluster has 2",
            marks=pytest.mark.nightly,
        ),
        ({"num_gpus": 0}, "version 0.0.1", "has vllm-mars 0.0.1, but 0.1.0 is here"),
        pytest.param(
            {"num_gpus": 0},
            "without",
            "has vllm-mars None, but 0.1.0 is here",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_cluster_that_cannot_is_refused(options, resources, node, message):
    import ray

    options = dataclasses.replace(options, tensor_parallel=2, pipeline_parallel=2)
    head = {"num_cpus": 1, **resources, "env_vars": {"VLLM_MARS_TEST_NODE": node}}
    with cluster(head, **{MARK: MARK_VALUE}) as started:
        with pytest.raises(RuntimeError, match=message):
            RayRunner(sweep_of(options), started.address)
        assert not ray.is_initialized()


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_real_servers_are_measured_and_judged_in_tasks(tiny_model, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "run.jsonl"
    prompts.write_text('{"id": "a", "prompt": "w20 w21 w22 w20 w21 w22 w20 w21"}\n')
    with cluster({"num_cpus": 2, "num_gpus": 0}, **{MARK: MARK_VALUE}) as started:
        arguments = [
            *("--ray", started.address, "--model", str(tiny_model)),
            *("--prompts", str(prompts), "--output", str(output), "--repeats", "1"),
            *("--method", "autoregressive", "mars", "--theta", "0.5", "1", "--gap"),
            *("--price", "--no-unprotected", "--temperature", "0", "--concurrency", "1"),
            *("--max-tokens", "8", "--server-arg=--max-model-len=256"),
        ]
        assert main(["sweep", *arguments]) == 0
    wait_until(lambda: not marked(MARK_VALUE), 30, "all servers and processes of the cluster end")
    cells = {cell.key.rule: cell for cell in read_cells(output)}
    assert set(cells) == {"autoregressive", "mars 0.5", "mars 1"}
    for cell in cells.values():
        assert cell.status == "ok" and cell.speed.output_tokens > 0
        assert cell.quality.estimate("nll").value > 0
    assert cells["mars 1"].quality.estimate("agreement").value == 1


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """Nodes "a", the head, and "b", which the last test takes away; leaves no process."""
    # What the worker of a lost node had open stays.
    temporary = {"TMPDIR": str(tmp_path_factory.mktemp("nodes"))}
    with cluster(
        {"num_cpus": 2, "num_gpus": 0, "env_vars": {"VLLM_MARS_TEST_NODE": "a", **temporary}},
        {"num_cpus": 2, "num_gpus": 0, "env_vars": {"VLLM_MARS_TEST_NODE": "b", **temporary}},
        **{MARK: MARK_VALUE, "VLLM_MARS_TEST_MEASURE": "stand-in"},
    ) as started:
        yield started
    wait_until(lambda: not marked(MARK_VALUE), 30, "all processes of the cluster end")


def test_what_is_refused_within_seconds(two_nodes, options, monkeypatch):
    import ray

    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ray=127.0.0.1:1 does not answer: .*is the head node"):
        RayRunner(sweep_of(options), "127.0.0.1:1")
    with pytest.raises(RuntimeError, match="ray='nowhere' is not an address; write HOST:PORT"):
        RayRunner(sweep_of(options), "nowhere")
    with monkeypatch.context() as other:
        other.setattr(ray, "__version__", "2.0.0")
        with pytest.raises(RuntimeError, match=r"(?s)ray=.*Version mismatch.*Ray: 2\.0\.0"):
            RayRunner(sweep_of(options), two_nodes.address)
    missing = dataclasses.replace(options, model="/nowhere")
    RayRunner(sweep_of(missing), two_nodes.address).close()
    assert time.monotonic() - begin < 60


def test_a_node_that_is_lost_costs_no_cell_and_doubles_none(two_nodes, options):
    sweep = sweep_of(options)
    groups = plan(sweep, side_by_side=1)
    wanted = {key for group in groups for key, _ in group.cells}
    assert len(groups) == 8
    assert len(wanted) == 24
    cells, lost_at = [], None

    def emit(cell):
        nonlocal lost_at
        cells.append(cell)
        # In the middle of a group of "b".
        mine = [c for c in cells if c.reason == "b"]
        if lost_at is None and len(mine) == 4:
            two_nodes.remove_node(*two_nodes.worker_nodes, allow_graceful=False)
            lost_at = len(cells)

    runner = RayRunner(sweep, two_nodes.address)
    try:
        for cell in runner.run(groups):
            emit(cell)
    finally:
        runner.close()
    assert collections.Counter(cell.key for cell in cells) == collections.Counter(wanted)
    nodes = [cell.reason for cell in cells]
    assert set(nodes) == {"a", "b"}
    assert {"a", "b"} == set(nodes[:lost_at]), "the cells were not spread"
    # One that "b" had sent before it was lost may still be taken.
    assert nodes[lost_at + 1 :].count("b") == 0
    assert nodes.count("b") < 6, "the node was not lost"
