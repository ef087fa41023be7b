"""A server as a child process: answers, failures, and no process left."""

import os
import signal
import time
import uuid

import pytest

from processes import MARK, marked
from stand_in import StandInServer
from vllm_mars.servers.scrape import (
    ACCEPTED_TOKENS,
    DRAFTS,
    GENERATED_TOKENS,
    openai_client,
)
from vllm_mars.servers.server import VllmServer

ARGS = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "512"]
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}'
REAL_AT_NIGHT = pytest.mark.parametrize(
    "server_class", [StandInServer, pytest.param(VllmServer, marks=pytest.mark.nightly)]
)


@pytest.fixture
def mark():
    return uuid.uuid4().hex


@pytest.mark.engine
def test_serves_counts_and_ends(packaged_model, tmp_path, mark):
    args = [*ARGS, "--speculative-config", NGRAM]
    env = {MARK: mark}
    server = VllmServer(packaged_model, args, log_path=tmp_path / "logs" / "server.log", env=env)
    with server:
        before = server.metrics()
        answer = openai_client(server.base_url, 60).chat.completions.create(
            model=str(packaged_model),
            messages=[{"role": "user", "content": "Repeat: red green blue, red green blue."}],
            max_tokens=24,
            temperature=0,
        )
        metrics = server.metrics()
        assert len(marked(mark)) >= 2
        with pytest.raises(RuntimeError, match=r"running already .*call close"):
            server.start()
    assert marked(mark) == []
    drafts, drafted, accepted = (
        metrics[name] - before.get(name, 0) for name in (DRAFTS, DRAFTED, ACCEPTED_TOKENS)
    )
    assert 0 < drafted <= 2 * drafts and 0 <= accepted <= drafted
    assert metrics[GENERATED_TOKENS] == answer.usage.completion_tokens
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}' in metrics
    with pytest.raises(RuntimeError, match=r"not running; call start"):
        server.metrics()


@REAL_AT_NIGHT
def test_a_failed_start_shows_the_end_of_the_log(tmp_path, mark, server_class):
    server = server_class(tmp_path / "none", ARGS, log_path=tmp_path / "s.log", env={MARK: mark})
    with pytest.raises(RuntimeError, match=r"ended while starting with exit status 1") as error:
        server.__enter__()
    assert str(tmp_path / "s.log") in str(error.value)
    assert str(tmp_path / "none") in str(error.value).split("the end of", 1)[1]
    assert marked(mark) == []


@REAL_AT_NIGHT
def test_a_server_that_takes_too_long_is_ended(packaged_model, tmp_path, mark, server_class):
    args = [*ARGS, "--load-seconds=60"] if server_class is StandInServer else ARGS
    server = server_class(
        packaged_model, args, log_path=tmp_path / "s.log", env={MARK: mark}, startup_timeout=2.0
    )
    with pytest.raises(RuntimeError, match=r"within startup_timeout=2 s"), server:
        pass
    assert marked(mark) == []


def test_a_crash_shows_the_end_of_the_log(packaged_model, tmp_path, mark):
    with StandInServer(packaged_model, log_path=tmp_path / "s.log", env={MARK: mark}) as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"ended unexpectedly with exit status 137") as error:
            while True:
                server.check_alive()
                time.sleep(0.05)
    assert "startup complete" in str(error.value).split("the end of", 1)[1]
    assert marked(mark) == []
