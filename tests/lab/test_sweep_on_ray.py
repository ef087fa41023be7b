"""A sweep on a Ray cluster of two nodes, one of which is lost; refusals at once."""

import collections
import dataclasses
import time

import pytest

from clusters import cluster
from processes import MARK, marked, wait_until

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

from vllm_mars.cli.__main__ import main
from vllm_mars.lab.plan import SweepOptions, load_sweep
from vllm_mars.lab.ray_turns import RayRunner
from vllm_mars.lab.records import read_sweep
from vllm_mars.lab.rows import rows

# Each test starts Ray clusters.
pytestmark = pytest.mark.nightly
MARK_VALUE = "sweep"


@pytest.fixture
def options(tmp_path):
    """24 turns on 4 servers, so that a lost node leaves groups unfinished."""
    return SweepOptions(
        model=str(tmp_path),
        methods=("autoregressive", "standard", "strict", "block"),
        num_prompts=6,
        block=1,
    )


@pytest.mark.parametrize(
    ("resources", "node", "message"),
    [
        (
            {"num_gpus": 2},
            "a",
            "a server needs 4 GPUs .*but the largest node of this cluster has 2 and 1",
        ),
        ({"num_gpus": 0}, "version 0.0.1", "has vllm-mars 0.0.1, but 0.1.0 is here"),
        ({"num_gpus": 0}, "without", "has vllm-mars None, but 0.1.0 is here"),
    ],
)
def test_an_unsuitable_cluster_is_refused(options, resources, node, message):
    import ray

    options = dataclasses.replace(options, gpus=4)
    head = {"num_cpus": 1, **resources, "env_vars": {"VLLM_MARS_TEST_NODE": node}}
    with cluster(head, **{MARK: MARK_VALUE}) as started:
        with pytest.raises(RuntimeError, match=message):
            RayRunner(load_sweep(options), started.address)
        assert not ray.is_initialized()


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_real_servers_are_measured_in_tasks(tiny_model, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "run.jsonl"
    prompts.write_text('{"id": "a", "prompt": "w20 w21 w22 w20 w21 w22 w20 w21"}\n')
    with cluster({"num_cpus": 2, "num_gpus": 0}, **{MARK: MARK_VALUE}) as started:
        arguments = [
            f"--ray={started.address}",
            f"--model={tiny_model}",
            f"--prompts={prompts}",
            f"--output={output}",
            "--max-tokens=8",
            "--method=standard",
            *("--theta", "0.5", "1"),
            "--server-arg=--max-model-len=256",
        ]
        assert main(["sweep", *arguments]) == 0
    wait_until(lambda: not marked(MARK_VALUE), 30, "all servers and processes of the cluster end")
    by_name = {row.cell.name: row for row in rows(read_sweep(output))}
    assert set(by_name) == {"standard", "theta 0.5", "theta 1"}
    for row in by_name.values():
        assert row.length.value > 0 and row.tpot.value > 0
    assert by_name["theta 1"].lost.value == 0


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """Nodes "a", the head, and "b", which the last test removes; no process is left."""
    # The worker of a lost node leaves files.
    temporary = {"TMPDIR": str(tmp_path_factory.mktemp("nodes"))}
    with cluster(
        {"num_cpus": 2, "num_gpus": 0, "env_vars": {"VLLM_MARS_TEST_NODE": "a", **temporary}},
        {"num_cpus": 2, "num_gpus": 0, "env_vars": {"VLLM_MARS_TEST_NODE": "b", **temporary}},
        **{MARK: MARK_VALUE, "VLLM_MARS_TEST_MEASURE": "stand-in"},
    ) as started:
        yield started
    wait_until(lambda: not marked(MARK_VALUE), 30, "all processes of the cluster end")


def test_refusals_within_seconds(two_nodes, options, monkeypatch):
    import ray

    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ray=127.0.0.1:1 does not answer: .*Is the head node"):
        RayRunner(load_sweep(options), "127.0.0.1:1")
    with pytest.raises(RuntimeError, match="ray=nowhere does not answer: .*; write HOST:PORT"):
        RayRunner(load_sweep(options), "nowhere")
    with monkeypatch.context() as other:
        other.setattr(ray, "__version__", "2.0.0")
        with pytest.raises(RuntimeError, match=r"(?s)ray=.*Version mismatch.*Ray: 2\.0\.0"):
            RayRunner(load_sweep(options), two_nodes.address)
    missing = dataclasses.replace(options, model="/nowhere")
    RayRunner(load_sweep(missing), two_nodes.address).close()
    assert time.monotonic() - begin < 60


def test_a_lost_node_loses_and_repeats_no_turn(two_nodes, options):
    sweep = load_sweep(options)
    groups = sweep.groups(1)
    wanted = {turn.key for _, turns in groups for turn in turns}
    assert (len(groups), len(wanted)) == (4, 24)
    records, lost_at = [], None
    runner = RayRunner(sweep, two_nodes.address)
    try:
        for record in runner.run(groups):
            records.append(record)
            # In the middle of a group of "b"; the reason is the node's name.
            if lost_at is None and [r.reason for r in records].count("b") == 4:
                two_nodes.remove_node(*two_nodes.worker_nodes, allow_graceful=False)
                lost_at = len(records)
    finally:
        runner.close()
    assert collections.Counter(r.key for r in records) == collections.Counter(wanted)
    nodes = [r.reason for r in records]
    assert set(nodes) == {"a", "b"}
    assert {"a", "b"} == set(nodes[:lost_at]), "the turns were not spread"
    # A record that "b" sent before it was lost may still arrive.
    assert nodes[lost_at + 1 :].count("b") == 0
    assert nodes.count("b") < 6, "the node was not lost"
