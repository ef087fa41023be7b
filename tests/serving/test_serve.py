"""The Ray Serve application: answers, refusals, replicas that are killed or replaced under load."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import openai
import pytest

from clusters import cluster, needs_ray_serve
from processes import MARK, marked, wait_until
from vllm_mars.servers.scrape import totals

ray = pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
pytestmark = needs_ray_serve

MARK_VALUE = "serve"
REPLICA = "ray::ServeReplica:default:LLMServer"
NUM_STREAMS = 200
IN_FLIGHT = 24
# Load while engines start on the same cores.
FEW_IN_FLIGHT = 6
TOKENS = 24
# A request may wait until engines have started.
SECONDS = 300
PROMPTS = [f"w{10 + n} w{20 + n} w{30 + n} w{10 + n} w{20 + n}" for n in range(10)]
# Without the override each replica would allocate VLLM_CPU_KVCACHE_SPACE.
ENGINE = {
    "max_model_len": 128,
    "max_num_seqs": 32,
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 256,
}


@pytest.fixture(scope="module")
def ray_cluster():
    """A cluster with eight virtual CPUs that leaves no process."""
    environment = {
        MARK: MARK_VALUE,
        # A busy machine answers late.
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
        "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
    }
    with cluster({"num_cpus": 8, "num_gpus": 0}, **environment) as started:
        ray.init(address=started.address, log_to_driver=False)
        yield started
    wait_until(lambda: not marked(MARK_VALUE), 60, "all processes of the cluster end")


def test_options_of_a_command_line_are_text():
    from vllm_mars.ray_serve import SPECULATION, Options, _autoscaling_config

    options = Options.model_validate(
        {"min_replicas": "2", "engine_kwargs": '{"tensor_parallel_size": 4}', "routing": "load"}
    )
    assert options.min_replicas == 2
    scaling = {"min_replicas": 0, "max_replicas": 2, "target_ongoing_requests": 2}
    further = Options.model_validate({**scaling, "autoscaling": '{"downscale_delay_s": 5}'})
    assert _autoscaling_config(further) == {**scaling, "downscale_delay_s": 5}
    assert options.engine_kwargs == {"tensor_parallel_size": 4}
    assert options.speculative_config == SPECULATION
    with pytest.raises(ValueError, match="routing"):
        Options(routing="random")


def test_the_engine_gets_the_tool_parser_and_the_chat_template():
    """Ray passes them only to the API server, but strict spans follow from them."""
    from vllm_mars.ray_serve import Options, _engine_kwargs

    kwargs = {"tool_call_parser": "hermes", "chat_template": "t", "additional_config": {"x": 1}}
    assert _engine_kwargs(Options(engine_kwargs=kwargs))["additional_config"] == {
        "x": 1,
        "mars_tool_call_parser": "hermes",
        "mars_chat_template": "t",
    }
    strict = {"method": "ngram", "num_speculative_tokens": 4}
    options = Options(engine_kwargs=kwargs, speculative_config=strict)
    assert _engine_kwargs(options) == {**kwargs, "speculative_config": strict}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"speculative_config": '{"mars_theta": 0.9}'}, ValueError, "mars_theta=0.9 is given, but"),
        ({"min_replicas": 3, "max_replicas": 2}, ValueError, "max_replicas .2. must be greater"),
        ({"min_replicas": 0, "max_replicas": 0}, ValueError, "max_replicas"),
        (
            {"autoscaling": '{"downscale_delay": 60}'},
            ValueError,
            "has 'downscale_delay'; it may have .*downscale_delay_s",
        ),
        ({"autoscaling": {"max_replicas": 2}}, ValueError, "autoscaling has 'max_replicas'; it "),
        ({"autoscaling": {"downscale_delay_s": "soon"}}, ValueError, "downscale_delay_s"),
        ({"thetta": 0.9}, ValueError, "thetta"),
        ({"speculative_config": "{"}, ValueError, "speculative_config"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    ray_cluster, tiny_model, options, error, message
):
    from vllm_mars.ray_serve import Options, app

    begin = time.monotonic()
    with pytest.raises(error, match=message):
        app(Options(model=str(tiny_model), **options))
    assert time.monotonic() - begin < 60


def test_a_node_with_another_version_is_refused_by_name(ray_cluster, tiny_model, monkeypatch):
    from vllm_mars.ray_serve import Options, app

    node = ray_cluster.add_node(num_cpus=0, env_vars={"VLLM_MARS_TEST_NODE": "version 0.0.1"})
    try:
        with pytest.raises(
            RuntimeError, match=rf"node \w+ \({os.uname().nodename}, .*\) has vllm-mars 0.0.1, but "
        ):
            app(Options(model=str(tiny_model)))
    finally:
        ray_cluster.remove_node(node)


@contextlib.contextmanager
def ray_serve():
    from ray import serve

    from vllm_mars.servers.server import free_port

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


@contextlib.contextmanager
def application(model, **options):
    with ray_serve() as url:
        run(model, **options)
        yield url


def run(model, theta=0.5, **options):
    """Runs the application, replacing one that already runs."""
    from ray import serve

    from vllm_mars.models.drafts import NGRAM, speculative_config
    from vllm_mars.ray_serve import Options, app

    arguments = Options(
        model=str(model),
        model_id="tiny",
        engine_kwargs=ENGINE,
        speculative_config=speculative_config(
            NGRAM, 4, rejection_sample_method="mars", mars_theta=theta
        ),
        routing="load",
        **options,
    )
    serve.run(app(arguments))


def replicas():
    """Returns the processes of the engines' replicas once all of them are ready, else none."""
    from ray import serve

    (deployments,) = [a.deployments for a in serve.status().applications.values()]
    running = sum(
        status.replica_states.get("RUNNING", 0)
        for name, status in deployments.items()
        if name.startswith("LLMServer")
    )
    pids = []
    for pid in marked(MARK_VALUE):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_text().startswith(REPLICA):
                pids.append(pid)
    return pids if len(pids) == running else []


def client_of(url):
    """A client that does not repeat a lost request."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS)


async def ask(client, prompt, **options):
    """Returns the text of a stream; raises if it breaks off."""
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        extra_body={"ignore_eos": True, "vllm_xargs": options},
    )
    parts, reason = [], None
    async for chunk in stream:
        if chunk.choices:
            parts.append(chunk.choices[0].delta.content or "")
            reason = chunk.choices[0].finish_reason or reason
    if reason != "length":
        raise openai.APIError(f"the stream ended by {reason}", stream.response.request, body=None)
    return "".join(parts)


async def load(url, expected, numbers, in_flight=IN_FLIGHT, kill_after=None, kill=None, **options):
    """Requests a stream for each number; returns the errors of those that broke off."""
    client = client_of(url)
    numbers, done, broken = iter(numbers), 0, []

    async def worker():
        nonlocal done
        for number in numbers:
            prompt = PROMPTS[number % len(PROMPTS)]
            try:
                text = await asyncio.wait_for(ask(client, prompt, **options), SECONDS)
            except openai.APIError as error:
                broken.append(error)
            else:
                assert text == expected[prompt]
            done += 1
            if done == kill_after:
                kill()

    async with client:
        await asyncio.gather(*(worker() for _ in range(in_flight)))
    return broken


def load_while(act, url, expected, **options):
    """Requests streams until `act` has returned; returns their number; none may break off."""
    ended, numbers = threading.Event(), itertools.count()

    def acting():
        try:
            act()
        finally:
            ended.set()

    async def both():
        until_then = itertools.takewhile(lambda _: not ended.is_set(), numbers)
        streams = load(url, expected, until_then, FEW_IN_FLIGHT, **options)
        broken, _ = await asyncio.gather(streams, asyncio.to_thread(acting))
        return broken

    assert asyncio.run(both()) == []
    return next(numbers) - 1


def sequential_answers(url, **options):
    async def ask_all():
        async with client_of(url) as client:
            return {prompt: await ask(client, prompt, **options) for prompt in PROMPTS}

    expected = asyncio.run(ask_all())
    assert len(set(expected.values())) > 1
    return expected


def check_refused(url, theta, message):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS)
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": PROMPTS[0]}],
            extra_body={"vllm_xargs": {"mars_theta": theta}},
        )


def check_the_front(url):
    """Checks a refusal, and Ray's health and metrics."""
    check_refused(url, 7, r"mars_theta=7 is outside \(0, 1\]")
    with urllib.request.urlopen(f"{url}/-/healthz", timeout=30) as answer:
        assert answer.read() == b"success"
    (port,) = {node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]}

    def verified():
        try:
            metrics = totals(f"http://127.0.0.1:{port}/metrics", 10)
        except OSError:
            return False
        # Ray's prefix replaces vLLM's.
        name = "ray_vllm_mars_verified_positions_total"
        return any(value for key, value in metrics.items() if key.startswith(name))

    wait_until(verified, 60, "the node's metrics count verified positions")


@pytest.mark.engine
def test_one_replica_answers(ray_cluster, tiny_model):
    with application(tiny_model) as url:
        wait_until(lambda: len(replicas()) == 1, 300, "a replica")
        assert asyncio.run(load(url, sequential_answers(url), range(IN_FLIGHT))) == []
        check_the_front(url)


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_the_command_serves_until_ctrl_c(ray_cluster, tiny_model, tmp_path):
    """`serve run`, whose arguments are text."""
    arguments = [f"model={tiny_model}", "model_id=tiny", f"engine_kwargs={json.dumps(ENGINE)}"]
    command = [
        Path(sys.executable).with_name("serve"),
        "run",
        "vllm_mars.ray_serve:app",
        *arguments,
    ]
    log = tmp_path / "run.log"
    with ray_serve() as url, log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, "RAY_ADDRESS": ray_cluster.address},
            stdout=out,
            stderr=out,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            wait_until(
                lambda: process.poll() is not None or "is ready at" in log.read_text(),
                timeout=600,
                what="the application runs",
            )
            assert process.poll() is None, log.read_text()
            sequential_answers(url)
            process.send_signal(signal.SIGINT)
            process.wait(120)
        finally:
            process.kill()
            process.wait()
        with pytest.raises(openai.APIError):
            sequential_answers(url)


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_a_replica_is_killed_under_load(ray_cluster, tiny_model):
    with application(tiny_model, min_replicas=2) as url:
        wait_until(lambda: len(replicas()) == 2, 600, "two replicas")
        before = replicas()
        expected = sequential_answers(url)

        def kill():
            os.kill(before[0], signal.SIGKILL)

        broken = asyncio.run(
            load(url, expected, range(NUM_STREAMS), kill_after=NUM_STREAMS // 3, kill=kill)
        )
        # At most those on the dead replica, and none waited for its timeout.
        assert len(broken) <= IN_FLIGHT
        assert not [error for error in broken if isinstance(error, openai.APITimeoutError)]

        wait_until(lambda: len(replicas()) == 2, 600, "the dead replica comes back")
        after = replicas()
        assert before[0] not in after
        assert before[1] in after
        assert asyncio.run(load(url, expected, range(NUM_STREAMS))) == []
        check_the_front(url)


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_the_rule_changes_under_load_and_no_stream_breaks_off(ray_cluster, tiny_model):
    with application(tiny_model, theta=0.5, min_replicas=2) as url:
        wait_until(lambda: len(replicas()) == 2, 600, "two replicas")
        before = set(replicas())
        sequential_answers(url, mars_theta=0.6)
        # Stricter than the server before and after, so answers do not change.
        expected = sequential_answers(url, mars_theta=0.9)

        def change():
            run(tiny_model, theta=0.8, min_replicas=2)
            wait_until(lambda: len(replicas()) == 2, 600, "two replicas")

        assert load_while(change, url, expected, mars_theta=0.9) > FEW_IN_FLIGHT
        assert not before & set(replicas())
        check_refused(url, 0.6, r"mars_theta=0.6 is below this server's own 0.8, but a request may")
