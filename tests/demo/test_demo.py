"""The demo on real servers: its file, its report, and that it ends everything it started."""

import json
import os
import signal
import subprocess
import sys
import uuid

import pytest
from transformers import AutoModelForCausalLM

import tiny_models
from processes import MARK, marked, wait_until
from vllm_mars.demo.options import MODES, DemoOptions
from vllm_mars.local.drafts import NGRAM_CONFIG, RECOMMENDED

pytestmark = pytest.mark.engine

PROMPTS = [
    {"id": "list", "prompt": "w10 w20 w30 w10 w20 w30 w10 w20"},
    {"id": "two", "turns": ["w40 w50 w60 w40 w50", "w70 w80 w70 w80 w70"]},
]


@pytest.fixture(scope="module")
def model(tiny_model):
    """A tiny target, beside it a draft that it often agrees with."""
    draft = tiny_model.with_name("eagle-head")
    target = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32")
    tiny_models.eagle(draft, target)
    return tiny_model


def start_demo(tmp_path, model, mark, *arguments):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm_mars.cli", "demo", "--model", str(model)),
            *("--draft", str(model.with_name("eagle-head"))),
            *("--prompts", str(prompts), "--max-tokens", "32", "--theta", "0.6"),
            *("--output", str(tmp_path / "out" / "demo.json"), *arguments),
            # As much as the tiny model takes.
            "--server-arg=--max-model-len=512",
        ],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background makes them ignore it, children too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_demo(tmp_path, model):
    mark = uuid.uuid4().hex
    process = start_demo(tmp_path, model, mark, "--repeats", "2", "--short")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert marked(mark) == []
    result = json.loads((tmp_path / "out" / "demo.json").read_text())

    assert result["schema"] == 2
    assert set(result["versions"]) == {"vllm_mars", "vllm", "torch", "python"}
    assert set(result["hardware"]) == {"cpu", "cores", "memory_gib", "gpu"}
    assert result["command"][1:3] == ["demo", "--model"]
    for mode in MODES:
        figures = result[mode]
        assert len(figures["answers"]) == 2 * 3
        assert figures["tokens_per_second"] > 0
        assert 0 < figures["tpot_seconds"] < figures["seconds_per_answer"]
        assert 0 < figures["ttft_seconds"] < figures["seconds_per_answer"]
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
    assert result["strict"]["equal_answers"] == result["autoregressive"]["equal_answers"] == 3
    assert result["mars"]["equal_answers"] == sum(
        mars["text"] == plain["text"]
        for mars, plain in zip(
            result["mars"]["answers"][:3], result["autoregressive"]["answers"][:3], strict=True
        )
    )
    for pair in ("strict_over_autoregressive", "mars_over_autoregressive", "mars_over_strict"):
        for found in result["comparison"]["speedup"][pair].values():
            assert found["prompts"] == 2
            assert 0 < found["low"] <= found["median"] <= found["high"]

    mars, strict = result["mars"], result["strict"]
    assert mars["theta"] == 0.6
    assert mars["mean_acceptance_length"] > strict["mean_acceptance_length"] > 1
    assert mars["verified_tokens"] >= mars["accepted_tokens"] >= mars["relaxed_tokens"] > 0
    assert mars["relaxed_tokens"] == sum(len(item["tokens"]) for item in mars["relaxed"])
    # What the server said that it relaxed is what was not the target's first choice.
    example = mars["example"]
    assert example["same_text"] is True
    assert all(token["logprob"] < token["best_logprob"] for token in example["tokens"])
    (told,) = (
        item["tokens"]
        for item in mars["relaxed"]
        if (item["id"], item["turn"]) == (example["id"], example["turn"])
    )
    assert told == [
        {"position": token["position"], "text": token["text"]} for token in example["tokens"]
    ]
    assert len(told) == max(len(item["tokens"]) for item in mars["relaxed"])
    (lost,) = (
        answer["loss_nats"]
        for answer in mars["answers"]
        if (answer["id"], answer["turn"], answer["repeat"]) == (example["id"], example["turn"], 0)
    )
    assert lost == pytest.approx(
        sum(token["best_logprob"] - token["logprob"] for token in example["tokens"]), abs=0.01
    )

    assert "mean acceptance length" in out
    assert "What the target would have said there" in out
    assert "This short form shows that it works, not how fast" in out
    assert err.startswith("starting three vLLM servers: none ready; at a guess ")
    assert "asking the three in turn: 0 of 18 answers, now autoregressive; about " in err
    assert "ending the servers" in err
    assert len(err.splitlines()) < 30, err
    assert "\x1b[" not in out, "no colour codes without a terminal"


# 7 processes: the demo has three guards and three servers; more: engine cores start.
@pytest.mark.parametrize(
    ("number", "code", "processes"),
    [
        pytest.param(signal.SIGINT, 130, 10, marks=pytest.mark.nightly),
        (signal.SIGTERM, 143, 7),
    ],
)
def test_a_signal_ends_all_servers(tmp_path, model, number, code, processes):
    mark = uuid.uuid4().hex
    process = start_demo(tmp_path, model, mark)
    wait_until(lambda: len(marked(mark)) >= processes, 200, "three servers")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    assert marked(mark) == []
    assert not (tmp_path / "out" / "demo.json").exists()


@pytest.mark.nightly
def test_a_server_that_dies_is_reported(tmp_path, model):
    mark = uuid.uuid4().hex
    process = start_demo(tmp_path, model, mark, "--server-arg=--no-such-option")
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
    recommended = DemoOptions(num_speculative_tokens=3)
    assert recommended.speculative_config("mars") == {**strict, **RECOMMENDED}
    assert recommended.rule_name == f"price {RECOMMENDED['mars_price']}"
    priced = DemoOptions(price=0.25, num_speculative_tokens=3)
    assert priced.speculative_config("mars") == {
        **strict,
        **{"rejection_sample_method": "mars", "mars_metric": "price", "mars_price": 0.25},
    }
    assert (options.rule_name, priced.rule_name) == ("theta 0.8", "price 0.25")
    with pytest.raises(ValueError, match=r"theta=0\.8 and price=0\.25 are two rules; give one of"):
        DemoOptions(theta=0.8, price=0.25)
    with pytest.raises(ValueError, match="mars_price=-1 is outside"):
        DemoOptions(price=-1)
    model = DemoOptions(draft="some/draft").speculative_config("strict")
    assert model == {"model": "some/draft", "num_speculative_tokens": 4}


@pytest.mark.nightly
def test_the_short_form_of_the_packaged_model_with_its_head(tmp_path, packaged_model):
    output = tmp_path / "demo.json"
    process = subprocess.run(
        [sys.executable, "-m", "vllm_mars.cli", "demo", "--short", "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(output.read_text())
    assert result["config"]["draft"] == "smollm2-135m-eagle3"
    assert (result["config"]["short"], result["config"]["max_tokens"]) == (True, 24)
    assert [len(result[mode]["answers"]) for mode in MODES] == [4, 4, 4]
    assert result["comparison"]["strict_text_equals_autoregressive"] is True
    lengths = {mode: result[mode]["mean_acceptance_length"] for mode in MODES}
    assert lengths["mars"] >= lengths["strict"] > lengths["autoregressive"] == 1
