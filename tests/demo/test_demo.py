"""The demo on real servers: its file, its report, and that it ends everything it started."""

import json
import os
import signal
import subprocess
import sys
import uuid

import pytest

from processes import MARK, marked, wait_until
from vllm_mars.demo.run import MODES, DemoOptions
from vllm_mars.local.drafts import NGRAM_CONFIG

pytestmark = pytest.mark.engine

PROMPTS = [
    {"id": "list", "prompt": "Repeat three times: the red cat sees the red dog."},
    {"id": "two", "turns": ["Write a short poem about the sea.", "Write the poem once more."]},
]


def start_demo(tmp_path, model, mark, *arguments):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm_mars.cli", "demo", "--model", str(model)),
            *("--prompts", str(prompts), "--max-tokens", "32", "--theta", "0.6"),
            *("--output", str(tmp_path / "out" / "demo.json"), *arguments),
        ],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background makes them ignore it, children too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_demo(tmp_path, packaged_model):
    mark = uuid.uuid4().hex
    process = start_demo(tmp_path, packaged_model, mark, "--repeats", "2")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert marked(mark) == []
    result = json.loads((tmp_path / "out" / "demo.json").read_text())

    assert result["schema"] == 1
    assert set(result["versions"]) == {"vllm_mars", "vllm", "torch", "python"}
    assert set(result["hardware"]) == {"cpu", "cores", "memory_gib", "gpu"}
    assert result["command"][1:3] == ["demo", "--model"]
    for mode in MODES:
        figures = result[mode]
        assert len(figures["answers"]) == 2 * 3
        assert figures["tokens_per_second"] > 0
        assert figures["output_tokens"] == sum(
            answer["output_tokens"] for answer in figures["answers"] if answer["repeat"] == 0
        )
        assert figures["seconds_per_answer"] == pytest.approx(
            figures["output_tokens"] / 3 / figures["tokens_per_second"]
        )
    assert result["autoregressive"]["mean_acceptance_length"] == 1.0
    assert result["autoregressive"]["verified_tokens"] == 0
    assert result["comparison"]["strict_text_equals_autoregressive"] is True
    assert result["comparison"]["differing_prompts"] == []

    mars, strict = result["mars"], result["strict"]
    assert mars["theta"] == 0.6
    assert mars["mean_acceptance_length"] > strict["mean_acceptance_length"] > 1
    assert mars["verified_tokens"] >= mars["accepted_tokens"] >= mars["relaxed_tokens"] > 0
    assert mars["relaxed_tokens"] == sum(len(item["tokens"]) for item in mars["relaxed"])
    assert mars["second_pass_same_text"] is True
    for item in mars["relaxed"]:
        assert all(token["logprob"] < token["best_logprob"] for token in item["tokens"])

    assert "mean acceptance length" in out
    assert "What the target would have said there" in out
    assert "\x1b[" not in out, "no colour codes without a terminal"


# 7 processes: the demo has three guards and three servers; more: engine cores start.
@pytest.mark.parametrize(
    ("number", "code", "processes"), [(signal.SIGINT, 130, 12), (signal.SIGTERM, 143, 7)]
)
def test_a_signal_ends_all_servers(tmp_path, packaged_model, number, code, processes):
    mark = uuid.uuid4().hex
    process = start_demo(tmp_path, packaged_model, mark)
    wait_until(lambda: len(marked(mark)) >= processes, 200, "three servers")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    assert marked(mark) == []
    assert not (tmp_path / "out" / "demo.json").exists()


def test_a_server_that_dies_is_reported(tmp_path, packaged_model):
    mark = uuid.uuid4().hex
    process = start_demo(tmp_path, packaged_model, mark, "--server-arg=--no-such-option")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "vLLM ended while starting" in err
    assert "--no-such-option" in err
    assert "Traceback" not in err.split("--- the end of")[0]
    assert marked(mark) == []


def test_speculative_configs():
    options = DemoOptions(theta=0.8, num_speculative_tokens=3)
    assert options.speculative_config("autoregressive") is None
    strict = options.speculative_config("strict")
    assert strict == {**NGRAM_CONFIG, "num_speculative_tokens": 3}
    assert options.speculative_config("mars") == {
        **strict,
        "rejection_sample_method": "mars",
        "mars_theta": 0.8,
    }
    model = DemoOptions(draft="some/draft").speculative_config("strict")
    assert model == {"model": "some/draft", "num_speculative_tokens": 4}
