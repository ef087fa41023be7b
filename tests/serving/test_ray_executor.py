"""`vllm serve` on vLLM's Ray executor: two ranks, nodes with different versions."""

import json
import os
import re

import pytest

import tiny_models
from clusters import cluster
from processes import MARK, marked, wait_until
from test_tensor_parallel import PROMPTS, generate, models_and_config
from vllm_mars import __version__
from vllm_mars.servers.scrape import fetch
from vllm_mars.servers.server import VllmServer

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each rank"),
]

TOKENS = 40


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target and its speculative config."""
    target, config = models_and_config(tmp_path_factory.mktemp("models"))
    tiny_models.tokenizer(target)
    return target, config


def two_ranks(models, ray_cluster, log_path, mark):
    """Makes a server without starting it."""
    target, config = models
    args = [
        "--enforce-eager",
        "--dtype=float32",
        "--served-model-name=tiny",
        "--max-model-len=128",
        "--max-num-seqs=4",
        "--tensor-parallel-size=2",
        "--distributed-executor-backend=ray",
        "--worker-extension-cls=look.Look",
        f"--speculative-config={json.dumps(config)}",
    ]
    env = {
        "RAY_ADDRESS": ray_cluster.address,
        # vLLM requires a binding of cores on one memory node.
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_SERVER_DEV_MODE": "1",
        MARK: mark,
    }
    return VllmServer(target, args, log_path=log_path, env=env)


def post(server, path, body):
    return json.loads(fetch(server.base_url + path, 60, body))


def complete(server, prompt):
    body = {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return post(server, "/v1/completions", body)["choices"][0]["token_ids"]


@pytest.mark.nightly
def test_two_ranks_on_ray_serve_what_one_generates(models, tmp_path):
    with (
        cluster({"num_cpus": 2, "num_gpus": 2}) as two_slots,
        two_ranks(models, two_slots, tmp_path / "server.log", "served") as server,
    ):
        served = [complete(server, prompt) for prompt in PROMPTS]
        ranks = post(server, "/collective_rpc", {"method": "look"})["results"]
        metrics = server.metrics()
    expected, *_ = generate(*models, ranks=1)
    assert served == expected
    assert sorted(rank for rank, _, _ in ranks) == [0, 1]
    assert {module for _, module, _ in ranks} == {"vllm_mars.worker.sampler_v1"}
    last = PROMPTS[-1] + served[-1]
    for rank, _, tokens in ranks:
        # The last token is never fed back.
        assert tokens[: len(last) - 1] == last[:-1], f"rank {rank}"
    # Tokens are counted once, not once per rank.
    assert metrics["vllm:generation_tokens_total"] == TOKENS * len(PROMPTS)
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_total"]
    drafted = metrics["vllm:spec_decode_num_draft_tokens_total"]
    assert 0 < accepted < drafted <= tiny_models.NUM_DRAFT_TOKENS * TOKENS * len(PROMPTS)


@pytest.mark.nightly
def test_a_node_that_differs_is_refused_by_name(models, tmp_path):
    """Ray's error names the rank and the node."""
    differs = {"num_cpus": 1, "num_gpus": 1, "env_vars": {"VLLM_MARS_TEST_NODE": "version 0.0.1"}}
    with cluster({"num_cpus": 1, "num_gpus": 1}, differs) as two_nodes:
        log = tmp_path / "server.log"
        with pytest.raises(RuntimeError, match="ended while starting with exit status 1"):
            two_ranks(models, two_nodes, log, "differs").__enter__()
        wait_until(lambda: not marked("differs"), 20, "the server's processes end")
    text = log.read_text()
    assert re.search(r"_TP1:RayWorkerProc.*ip=[\d.]+", text)
    assert (
        f"vllm-mars 0.0.1 is installed on the node {os.uname().nodename}, but the server's options "
        f"come from vllm-mars {__version__}; install {__version__} there."
    ) in text
    assert "Starting to load model" not in text
