"""A real sweep of a tiny model: ended in the middle, continued, with a draft that cannot start."""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest

from processes import MARK, marked, wait_until
from stand_in.answers import Handler, answering
from vllm_mars.lab import client
from vllm_mars.lab.plan import SweepOptions
from vllm_mars.lab.records import read_sweep
from vllm_mars.lab.rows import rows
from vllm_mars.lab.sweep import check_methods, run_sweep

PROMPTS = [
    {"id": "repeat", "prompt": "w20 w21 w22 w20 w21 w22 w20 w21 w22"},
    {"id": "two", "prompt": "w30 w31 w30 w31"},
    {"id": "three", "prompt": "w40 w41 w42 w43 w40 w41"},
]


@pytest.fixture(scope="module")
def directory(tiny_model, tmp_path_factory):
    """A model, a prompt file, and a draft that has a configuration but no weights."""
    path = tmp_path_factory.mktemp("sweep")
    (path / "tiny").symlink_to(tiny_model)
    (path / "broken").mkdir()
    shutil.copy(tiny_model / "config.json", path / "broken")
    (path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    return path


def sweep(directory, output, *arguments):
    return [
        *("sweep", "--model", str(directory / "tiny"), "--output", str(output)),
        *("--prompts", str(directory / "prompts.jsonl"), "--block", "2", "--max-tokens", "12"),
        *("--server-arg=--max-model-len=256", *arguments),
    ]


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_sweep_that_is_ended_continues(directory):
    output, mark = directory / "run.jsonl", uuid.uuid4().hex
    broken = json.dumps({"draft": str(directory / "broken"), "temperature": 0})
    arguments = sweep(
        *(directory, output, "--method", "standard"),
        *("--theta", "0.3", "1", "--cell", f"broken={broken}"),
        *("--cell", 'drawn={"mars_price": 2, "temperature": 1}'),
        *("--repeats", "2"),
    )

    def start():
        return subprocess.Popen(
            [sys.executable, "-m", "vllm_mars.cli", *arguments],
            env={**os.environ, MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell that starts the tests in the background makes them ignore it, children too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    process = start()
    wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 6, 900, "turns")
    second = start()
    _, err = second.communicate(timeout=120)
    assert second.returncode == 1 and "is in use by another sweep" in err
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err
    wait_until(lambda: marked(mark) == [], 10, "every process ends")
    before = [it for it in read_sweep(output).records if it.measured]

    process = start()
    out, err = process.communicate(timeout=1800)
    assert process.returncode == 1, "the broken draft's turns failed"
    assert marked(mark) == []
    assert "left" in err and "Traceback" not in err.split("--- the end of")[0]
    file = read_sweep(output)
    assert [it for it in file.records if it.key in {it.key for it in before}] == before
    assert len(file.heads) == 2
    # Two blocks and two passes of each cell.
    assert len(file.records) == 5 * 4
    check_figures(file, str(directory))
    assert "tokens per step" in out and "failed:" in out

    # What failed is not tried again by itself.
    process = start()
    _, err = process.communicate(timeout=120)
    assert "all 20 turns are in" in err and read_sweep(output) == file
    arguments[arguments.index("--max-tokens") + 1] = "13"
    process = start()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "was measured with max_tokens=12, but this sweep has 13; name another file" in err


def check_figures(file, directory):
    text = {}
    for record in file.records:
        assert (record.measured is None) == (record.name == "broken")
        if record.measured:
            for answer in record.measured.answers:
                assert 1 <= answer.tokens <= 12 and 0 < answer.ttft <= answer.seconds
                text.setdefault((record.name, answer.prompt), set()).add(answer.text)
    found = {row.cell.name: row for row in rows(file)}
    for name in ("standard", "theta 1"):
        assert found[name].lost.value == 0 and found[name].steps.value >= 1
    for prompt in PROMPTS:
        assert text["theta 1", prompt["id"]] == text["standard", prompt["id"]]
        assert len(text["standard", prompt["id"]]) == 1
    # Whether runners-up are taken is a matter of the random weights.
    assert found["theta 0.3"].lost.value >= 0
    assert found["theta 0.3"].steps.value >= found["standard"].steps.value
    # Each pass and prompt has a seed of its own.
    assert len(text["drawn", "repeat"]) == 2
    assert directory not in json.dumps([head.run["command"] for head in file.heads])
    assert directory not in json.dumps([record.config for record in file.records])


@pytest.mark.parametrize(
    ("options", "name", "nearest"),
    [
        ({"methods": ("standard", "marss")}, "marss", "mars"),
        ({"methods": ("autoregresive",)}, "autoregresive", "autoregressive"),
        ({"cells": ('own={"rejection_sample_method": "blocks"}',)}, "blocks", "block"),
    ],
)
def test_a_method_that_does_not_exist_is_refused_at_once(tmp_path, options, name, nearest):
    wrong = f"method='{name}' is no rejection_sample_method of vLLM .*; did you mean '{nearest}'"
    with pytest.raises(ValueError, match=wrong):
        run_sweep(SweepOptions(**options), tmp_path / "s.jsonl")
    assert not (tmp_path / "s.jsonl").exists()
    check_methods(SweepOptions(methods=("autoregressive", "standard", "block", "strict", "mars")))


def test_a_turn_that_fails_says_why():
    """The server answers HTTP 400, or not in time; and whoever asked goes on in this process."""
    version_of = importlib.metadata.version

    class Server(Handler):
        def do_POST(self):  # noqa: N802
            time.sleep(0.2)
            self.send_error(400, "Bad Request")

    def asked(address, timeout):
        url, requests = f"http://{address}", [("a", {}), ("b", {})]
        client.send_requests(url, "m", requests, max_tokens=1, concurrency=2, **timeout)

    with answering(Server) as address:
        with pytest.raises(RuntimeError, match=r"2 of 2 requests failed: Bad Request: .*model-len"):
            asked(address, {"timeout": 60})
        with pytest.raises(RuntimeError, match=r"took longer than turn_timeout=0\.1 s"):
            asked(address, {"timeout": 0.1})
    with pytest.raises(RuntimeError, match=r"2 of 2 requests failed: .*Cannot connect"):
        asked(address, {"timeout": 60})
    # Or equal nodes of a Ray cluster would have another vLLM than this process.
    assert importlib.metadata.version is version_of
