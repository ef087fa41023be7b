"""A real sweep of a tiny model: interrupted, resumed, with a draft that cannot start."""

import importlib.metadata
import json
import shutil
import signal
import time
import uuid

import pytest

from processes import marked, start, wait_until
from stand_in.answers import Handler, answering
from sweep_files import write_prompts
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
    """A model, a prompt file, and a draft with a configuration but without weights."""
    path = tmp_path_factory.mktemp("sweep")
    (path / "tiny").symlink_to(tiny_model)
    (path / "broken").mkdir()
    shutil.copy(tiny_model / "config.json", path / "broken")
    write_prompts(path / "prompts.jsonl", PROMPTS)
    return path


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_an_interrupted_sweep_resumes(directory):
    output, mark = directory / "run.jsonl", uuid.uuid4().hex
    broken = json.dumps({"draft": str(directory / "broken"), "temperature": 0})

    def start_sweep(max_tokens=12):
        options = {
            "--model": directory / "tiny",
            "--prompts": directory / "prompts.jsonl",
            "--output": output,
            "--method": "standard",
            "--block": 2,
            "--repeats": 2,
            "--max-tokens": max_tokens,
            "--server-arg": "--max-model-len=256",
        }
        words = [f"{option}={value}" for option, value in options.items()]
        words += ["--theta", "0.3", "1", "--cell", f"broken={broken}"]
        words += ["--cell", 'sampled={"mars_price": 2, "temperature": 1}']
        return start("-m", "vllm_mars.cli", "sweep", *words, mark=mark)

    process = start_sweep()
    wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 6, 900, "turns")
    second = start_sweep()
    _, err = second.communicate(timeout=120)
    assert second.returncode == 1 and "is in use by another sweep" in err
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err
    wait_until(lambda: marked(mark) == [], 10, "every process ends")
    before = {record.key: record for record in read_sweep(output).records if record.measured}

    process = start_sweep()
    out, err = process.communicate(timeout=1800)
    assert process.returncode == 1, "the broken draft's turns failed"
    assert marked(mark) == []
    assert "left" in err and "Traceback" not in err.split("--- the end of")[0]
    file = read_sweep(output)
    after = {record.key: record for record in file.records}
    assert {key: after[key] for key in before} == before
    assert len(file.heads) == 2
    # Two blocks and two passes of each cell.
    assert len(file.records) == 5 * 4
    check_figures(file, str(directory))
    assert "tokens per step" in out and "failed:" in out

    # Failed turns are not repeated without --retry-failed.
    process = start_sweep()
    _, err = process.communicate(timeout=120)
    assert "all 20 turns are in" in err and read_sweep(output) == file
    process = start_sweep(max_tokens=13)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "was measured with max_tokens=12, but this sweep has 13; name another file" in err


def check_figures(file, directory):
    texts = {}
    for record in file.records:
        assert (record.measured is None) == (record.name == "broken")
        if record.measured:
            for answer in record.measured.answers:
                assert 1 <= answer.tokens <= 12 and 0 < answer.ttft <= answer.seconds
                texts.setdefault((record.name, answer.prompt), set()).add(answer.text)
    by_name = {row.cell.name: row for row in rows(file)}
    for name in ("standard", "theta 1"):
        assert by_name[name].lost.value == 0 and by_name[name].steps.value >= 1
    for prompt in PROMPTS:
        assert texts["theta 1", prompt["id"]] == texts["standard", prompt["id"]]
        assert len(texts["standard", prompt["id"]]) == 1
    # The random weights decide whether runners-up are accepted.
    assert by_name["theta 0.3"].lost.value >= 0
    assert by_name["theta 0.3"].steps.value >= by_name["standard"].steps.value
    # Each pass and prompt has another seed.
    assert len(texts["sampled", "repeat"]) == 2
    assert directory not in json.dumps([head.run["command"] for head in file.heads])
    assert directory not in json.dumps([record.config for record in file.records])


@pytest.mark.parametrize(
    ("options", "name", "nearest"),
    [
        ({"methods": ("standard", "marss")}, "marss", "mars"),
        ({"methods": ("autoregresive",)}, "autoregresive", "autoregressive"),
        ({"cells": ('wrong={"rejection_sample_method": "blocks"}',)}, "blocks", "block"),
    ],
)
def test_an_unknown_method_is_refused_at_once(tmp_path, options, name, nearest):
    message = f"method='{name}' is no rejection_sample_method of vLLM .*; did you mean '{nearest}'"
    with pytest.raises(ValueError, match=message):
        run_sweep(SweepOptions(**options), tmp_path / "s.jsonl")
    assert not (tmp_path / "s.jsonl").exists()
    check_methods(SweepOptions(methods=("autoregressive", "standard", "block", "strict", "mars")))


def test_a_turn_that_fails_says_why():
    """The server answers HTTP 400, too late, or not at all."""
    version_of = importlib.metadata.version

    class Server(Handler):
        def do_POST(self):  # noqa: N802
            time.sleep(0.2)
            self.send_error(400, "Bad Request")

    def send(address, timeout):
        requests = [("a", {}), ("b", {})]
        url = f"http://{address}"
        client.send_requests(url, "m", requests, max_tokens=1, concurrency=2, timeout=timeout)

    with answering(Server) as address:
        with pytest.raises(RuntimeError, match=r"2 of 2 requests failed: Bad Request: .*model-len"):
            send(address, 60)
        with pytest.raises(RuntimeError, match=r"took longer than turn_timeout=0\.1 s"):
            send(address, 0.1)
    with pytest.raises(RuntimeError, match=r"2 of 2 requests failed: .*Cannot connect"):
        send(address, 60)
    # If it were replaced, equal nodes of a Ray cluster would seem to have other versions.
    assert importlib.metadata.version is version_of
