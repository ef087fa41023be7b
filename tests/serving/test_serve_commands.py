"""The documented commands: `serve deploy` with a YAML file, `serve status` and `serve run`."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import openai
import pytest
import yaml

from clusters import ENVIRONMENT, needs_ray_serve
from processes import MARK, kill, wait_until
from vllm_mars.local.drafts import NGRAM_CONFIG
from vllm_mars.local.server import free_port

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
# Not beside Serve's other tests: either fills two cores with its replicas.
pytestmark = [
    *(pytest.mark.engine, pytest.mark.nightly, pytest.mark.xdist_group("test_serve")),
    needs_ray_serve,
]

# Of this run alone: its processes are killed at the end.
MARK_VALUE = f"serve commands {os.getpid()}"
BIN = Path(sys.executable).parent
TOKENS = 8
ENGINE = {"max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 64}
SPECULATION = {
    **NGRAM_CONFIG,
    "num_speculative_tokens": 3,
    "rejection_sample_method": "mars",
    "mars_theta": 0.9,
    "mars_limit": 0.5,
}


@pytest.fixture(scope="module")
def command():
    """Runs Ray's commands against a cluster that `ray start` makes; leaves no process."""
    dashboard = free_port()
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        environment = {
            **os.environ,
            **ENVIRONMENT,
            MARK: MARK_VALUE,
            "RAY_TMPDIR": directory,
            # What killed processes leave goes with it.
            "TMPDIR": directory,
            # With a token in the home directory `ray start` asks for it, and `serve` sends none.
            "RAY_AUTH_MODE": "disabled",
        }

        def run(name, *arguments, timeout=120):
            done = subprocess.run(
                [BIN / name, *arguments],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        gcs = free_port()
        try:
            run(
                *("ray", "start", "--head", f"--port={gcs}", "--num-cpus=4", "--num-gpus=0"),
                *("--include-dashboard=true", f"--dashboard-port={dashboard}"),
                *("--object-store-memory=200000000", f"--temp-dir={directory}"),
            )
            environment["RAY_ADDRESS"] = f"127.0.0.1:{gcs}"
            run.environment = environment
            run.dashboard = f"http://127.0.0.1:{dashboard}"
            yield run
        finally:
            # Not `ray stop`, which ends every Ray on the machine.
            kill(MARK_VALUE)


def answer(url):
    """The text of one answer, strictly and relaxed; None while there is none."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    try:
        return [
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "w10 w20 w30 w10 w20"}],
                temperature=0,
                max_tokens=TOKENS,
                extra_body={"ignore_eos": True, "vllm_xargs": {"mars_theta": theta}},
            )
            .choices[0]
            .message.content
            for theta in (1.0, 0.5)
        ]
    except openai.APIError:
        return None


@pytest.mark.timeout(1200)
def test_serve_deploy_and_serve_run(command, tiny_model, tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = {
        "model": str(tiny_model),
        "engine_kwargs": ENGINE,
        "speculative_config": SPECULATION,
    }
    file = tmp_path / "serve.yaml"
    application = {"name": "mars", "import_path": "vllm_mars.serve:app", "route_prefix": "/"}
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{**application, "args": arguments}],
    }
    file.write_text(yaml.safe_dump(config))
    command("serve", "deploy", str(file), "--address", command.dashboard)

    def status():
        shown = yaml.safe_load(command("serve", "status", "--address", command.dashboard))
        return shown["applications"]["mars"]["status"]

    wait_until(lambda: status() in ("RUNNING", "DEPLOY_FAILED"), 600, "the application runs")
    assert status() == "RUNNING"
    deployed = answer(url)
    assert deployed and all(len(text.split()) == TOKENS for text in deployed)
    command("serve", "shutdown", "-y", "--address", command.dashboard)

    # The same by `serve run`, whose arguments are text; Ctrl-C ends the application.
    command("serve", "start", "--http-host", "127.0.0.1", "--http-port", str(port))
    log = tmp_path / "run.log"
    options = [f"{n}={v if n == 'model' else json.dumps(v)}" for n, v in arguments.items()]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [BIN / "serve", "run", "vllm_mars.serve:app", *options],
            env=command.environment,
            stdout=out,
            stderr=out,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        wait_until(
            lambda: process.poll() is not None or "is ready at" in log.read_text(),
            *(600, "the application runs"),
        )
        assert process.poll() is None, log.read_text()
        assert answer(url) == deployed
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        process.kill()
        process.wait()
    assert answer(url) is None
