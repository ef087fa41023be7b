"""The Ray Serve application: its answers, a replica killed under load, what is refused at once."""

import asyncio
import contextlib
import os
import signal
import time
import urllib.request
from pathlib import Path

import openai
import pytest

from clusters import cluster
from processes import MARK, marked, wait_until

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'vllm-mars[ray]'")

MARK_VALUE = "serve"
NUM_STREAMS = 200
IN_FLIGHT = 24
TOKENS = 24
PROMPTS = [f"w{10 + n} w{20 + n} w{30 + n} w{10 + n} w{20 + n}" for n in range(10)]
# Without the override the cache would take VLLM_CPU_KVCACHE_SPACE in each replica.
ENGINE = {
    "max_model_len": 128,
    "max_num_seqs": 32,
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 256,
}


@pytest.fixture(scope="module")
def ray_cluster():
    """Eight pretended CPUs; leaves no process."""
    environment = {
        MARK: MARK_VALUE,
        # A loaded machine answers late.
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
        "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
    }
    with cluster({"num_cpus": 8, "num_gpus": 0}, **environment) as started:
        ray.init(address=started.address, log_to_driver=False)
        yield started
    wait_until(lambda: not marked(MARK_VALUE), 60, "all processes of the cluster end")


def test_options_of_a_command_line_are_text():
    from vllm_mars.serve import SPECULATION, Options

    options = Options.model_validate(
        {"min_replicas": "2", "engine_kwargs": '{"tensor_parallel_size": 4}', "routing": "load"}
    )
    assert options.min_replicas == 2
    assert options.engine_kwargs == {"tensor_parallel_size": 4}
    assert options.speculative_config == SPECULATION
    with pytest.raises(ValueError, match="routing"):
        Options(routing="random")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"speculative_config": '{"mars_theta": 0.9}'}, ValueError, "mars_theta=0.9 is given, but"),
        (
            {"speculative_config": {"rejection_sample_method": "mars", "mars_theta": 2}},
            ValueError,
            r"mars_theta=2 is outside \(0, 1\]",
        ),
        ({"min_replicas": 3, "max_replicas": 2}, ValueError, "max_replicas=2 is below min_replic"),
        ({"thetta": 0.9}, ValueError, "thetta"),
        ({"speculative_config": "{"}, ValueError, "speculative_config"),
        ({"min_replicas": 9}, RuntimeError, "9 replicas of 1 ranks need 18 CPUs, but this Ray clu"),
        (
            {"engine_kwargs": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}},
            RuntimeError,
            "1 replicas of 8 ranks need 9 CPUs, but this Ray cluster has 8; lower",
        ),
    ],
)
def test_what_is_refused_before_anything_starts(ray_cluster, tiny_model, options, error, message):
    from vllm_mars.serve import Options, app

    begin = time.monotonic()
    with pytest.raises(error, match=message):
        app(Options(model=str(tiny_model), **options))
    assert time.monotonic() - begin < 60


def test_a_node_with_another_version_is_refused_by_name(ray_cluster, tiny_model, monkeypatch):
    from vllm_mars.serve import Options, app

    node = ray_cluster.add_node(num_cpus=0, env_vars={"VLLM_MARS_TEST_NODE": "version 0.0.1"})
    try:
        with pytest.raises(
            RuntimeError, match=rf"node \w+ \({os.uname().nodename}, .*\) has vllm-mars 0.0.1, but "
        ):
            app(Options(model=str(tiny_model)))
    finally:
        ray_cluster.remove_node(node)


def test_the_lock_travels_in_a_runtime_env(ray_cluster, tiny_model):
    """What docs/rollouts.md says of Ray: the environment of a node need not know of the lock."""
    from vllm_mars.local.drafts import NGRAM, RECOMMENDED, speculative_config

    model, lossy = str(tiny_model), speculative_config(NGRAM, 4, **RECOMMENDED)

    @ray.remote(num_cpus=1, runtime_env={"env_vars": {"VLLM_MARS_LOCK": "strict"}})
    def read_options():
        from vllm.engine.arg_utils import EngineArgs

        EngineArgs(model=model, speculative_config=lossy).create_engine_config()

    with pytest.raises(RuntimeError, match="VLLM_MARS_LOCK=strict forbids lossy verification, but"):
        ray.get(read_options.remote())


@contextlib.contextmanager
def application(model, min_replicas):
    """The address of a running application."""
    from ray import serve

    from vllm_mars.local.drafts import NGRAM, speculative_config
    from vllm_mars.local.server import free_port
    from vllm_mars.serve import Options, app

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = Options(
        model=str(model),
        model_id="tiny",
        min_replicas=min_replicas,
        engine_kwargs=ENGINE,
        speculative_config=speculative_config(
            NGRAM, 4, rejection_sample_method="mars", mars_theta=0.5
        ),
        routing="load",
    )
    serve.run(app(options))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


def replicas():
    """The processes of the replicas that hold an engine and are ready."""
    from ray import serve

    (deployments,) = [a.deployments for a in serve.status().applications.values()]
    running = sum(
        status.replica_states.get("RUNNING", 0)
        for name, status in deployments.items()
        if name.startswith("LLMServer")
    )
    found = [
        pid
        for pid in marked(MARK_VALUE)
        if Path(f"/proc/{pid}/cmdline")
        .read_text()
        .startswith("ray::ServeReplica:default:LLMServer")
    ]
    return found if len(found) == running else []


async def ask(client, prompt):
    """The text of one stream; raises where it broke off."""
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    parts, reason = [], None
    async for chunk in stream:
        if chunk.choices:
            parts.append(chunk.choices[0].delta.content or "")
            reason = chunk.choices[0].finish_reason or reason
    if reason != "length":
        raise openai.APIError(f"the stream ended by {reason}", stream.response.request, body=None)
    return "".join(parts)


async def load(url, expected, num_streams, kill_after=None, kill=None):
    """Asks so many streams; returns those that broke off."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    slots, done, broken = asyncio.Semaphore(IN_FLIGHT), 0, []

    async def one(number):
        nonlocal done
        prompt = PROMPTS[number % len(PROMPTS)]
        async with slots:
            try:
                text = await asyncio.wait_for(ask(client, prompt), 120)
            except openai.APIError as error:
                broken.append(error)
            else:
                assert text == expected[prompt]
            done += 1
            if done == kill_after:
                kill()

    async with client:
        await asyncio.gather(*map(one, range(num_streams)))
    return broken


def answers_alone(url):
    """The answer to each prompt while nothing else is asked."""

    async def alone():
        asking = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
        async with asking:
            return {prompt: await ask(asking, prompt) for prompt in PROMPTS}

    expected = asyncio.run(alone())
    assert len(set(expected.values())) > 1
    return expected


def check_the_front(url):
    """A bad value of a request is the client's error; health and metrics are Ray's own."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    with pytest.raises(openai.BadRequestError, match=r"mars_theta=7 is outside \(0, 1\]"):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": PROMPTS[0]}],
            extra_body={"vllm_xargs": {"mars_theta": 7}},
        )
    with urllib.request.urlopen(f"{url}/-/healthz", timeout=30) as answer:
        assert answer.read() == b"success"
    (port,) = {node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]}

    def metrics():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            return answer.read().decode()

    wait_until(lambda: "ray_vllm_spec_decode_num_accepted_tokens" in metrics(), 60, "metrics")


@pytest.mark.engine
def test_one_replica_answers(ray_cluster, tiny_model):
    with application(tiny_model, 1) as url:
        wait_until(lambda: len(replicas()) == 1, 300, "a replica")
        assert asyncio.run(load(url, answers_alone(url), IN_FLIGHT)) == []
        check_the_front(url)


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_a_replica_is_killed_under_load(ray_cluster, tiny_model):
    with application(tiny_model, 2) as url:
        wait_until(lambda: len(replicas()) == 2, 600, "two replicas")
        before = replicas()
        expected = answers_alone(url)

        def kill():
            os.kill(before[0], signal.SIGKILL)

        broken = asyncio.run(load(url, expected, NUM_STREAMS, NUM_STREAMS // 3, kill))
        # Those on the dead replica at most, and none waited for its timeout.
        assert len(broken) <= IN_FLIGHT
        assert not [error for error in broken if isinstance(error, openai.APITimeoutError)]

        wait_until(lambda: len(replicas()) == 2, 600, "the dead replica comes back")
        after = replicas()
        assert before[0] not in after
        assert before[1] in after
        assert asyncio.run(load(url, expected, NUM_STREAMS)) == []
        check_the_front(url)
