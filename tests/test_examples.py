"""The examples run as their pages say, on the packaged model."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import openai
import prometheus_client
import pytest

from counts import LAYOUT
from engines import packaged_server
from vllm_mars.lab.prompts import load_prompts
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.drafts import speculative_config
from vllm_mars.options.config import MarsConfig
from vllm_mars.report import metrics
from vllm_mars.servers.server import free_port

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
# MARS relaxes some tokens of its greedy answer (docs/serving.md).
PROMPT = next(prompt.turns[0] for prompt in load_prompts() if prompt.id == "rewrite-formal")

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("opt_in_server")]


def run(name, *arguments, timeout=500, **env):
    """Runs an example as a user does; returns its output."""
    command = [EXAMPLES / name, *map(str, arguments)]
    if name.endswith(".py"):
        command = [sys.executable, *command]
    # Without the setting by which the suite's engines share a process with their workers.
    inherited = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = subprocess.run(
        command, cwd=ROOT, env=inherited | env, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_picture_marks_relaxed_tokens(packaged_model, tmp_path):
    picture = tmp_path / "steps.svg"
    printed = run("first_steps.py", "--max-tokens", 48, "--output", picture)
    lost, count = re.search(r"^MARS, ([\d.]+) nats lost by (\d+) relaxed", printed, re.M).groups()
    text = "".join(ElementTree.parse(picture).getroot().itertext()).replace("\xa0", " ")
    marks = [float(nats) for nats in re.findall(r"\b\d\.\d\d\b", text.partition("MARS")[2])]
    # The first is the sum in the heading.
    assert marks[0] == float(lost) and len(marks[1:]) == int(count) > 0
    assert sum(marks[1:]) == pytest.approx(float(lost), abs=0.01 * int(count))
    strict, mars = printed.split("strict\n")[1].split("MARS, ")
    assert strict.strip() and strict.strip() not in mars


def exported(options):
    metrics.MarsProm(LAYOUT, {0: ["m", "0"]}, MarsConfig(**options))
    return prometheus_client.generate_latest().decode()


LOSSY = runpy.run_path(str(EXAMPLES / "lossy.py"))["lossy"]


@pytest.mark.parametrize(
    ("options", "max_loss", "xargs", "rule"),
    [
        ({"theta": 0.9}, None, {}, "mars_theta=0.9 with no bound"),
        ({"theta": 0.9}, 0.5, {"mars_max_loss": 0.5}, "mars_theta=0.9 with a bound of 0.5 nats"),
        ({"theta": 0.9, "max_loss": 0.1}, None, {}, "mars_theta=0.9 with the server's bound"),
        ({"price": 0.2}, None, {}, "mars_price=0.2 with no bound"),
        ({}, None, {}, "the server's bound"),
        (
            {"theta": 0.9, "max_loss": 0, "limit": 0.02},
            None,
            {"mars_max_loss": 0.02},
            "mars_theta=0.9 with a bound of 0.02 nats",
        ),
        ({"max_loss": 0, "limit": 0.02}, 0.01, {"mars_max_loss": 0.01}, "a bound of 0.01 nats"),
    ],
)
def test_a_lossy_request_gets_the_servers_rule(clean_registry, options, max_loss, xargs, rule):
    option, lossy_xargs, description = LOSSY(exported(options), max_loss)
    assert lossy_xargs == xargs and description.startswith(rule)
    assert option == (rule.partition("=")[0] if "=" in rule else "mars_max_loss")


@pytest.mark.parametrize(
    ("options", "max_loss", "message"),
    [
        ({"theta": 1}, None, "mars_theta=1 and is strict for all requests; start it with another"),
        ({"price": 0, "max_loss": 0.02}, None, "mars_price=0 and is strict for all requests"),
        ({"max_loss": 0}, None, "mars_max_loss=0 and is strict for all requests"),
        ({}, 0.03, r"MAX_LOSS=0.03 is outside \(0, 0.02\]; choose a value"),
        ({}, 0, r"MAX_LOSS=0 is outside \(0, 0.02\]"),
    ],
)
def test_a_strict_server_is_refused(clean_registry, options, max_loss, message):
    with pytest.raises(ValueError, match=message):
        LOSSY(exported(options), max_loss)


def test_an_overridden_server_and_one_without_mars_are_refused(clean_registry):
    text = exported({}) + 'vllm:mars_override{engine="0",option="mars_price"} NaN\n'
    assert LOSSY(text, None)[1] == {}
    text += 'vllm:mars_override{engine="0",option="mars_max_loss"} 0.01\n'
    with pytest.raises(ValueError, match="holds requests to mars_max_loss=0.01; write {} into"):
        LOSSY(text, None)
    with pytest.raises(ValueError, match="no metric vllm:mars_info; start it with rejection_"):
        LOSSY("", None)


@pytest.mark.parametrize("name", ["evaluate/evaluate.sh", "load.sh"])
def test_the_option_that_a_script_sets_is_refused(name):
    option = "--extra-body" if name == "load.sh" else "--gen-kwargs"
    command = [EXAMPLES / name, "http://127.0.0.1:9", "task", option, "{}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and f"error: {option} is this script's own" in done.stderr


def test_results_of_an_earlier_evaluation_are_not_replaced(tmp_path):
    (earlier := tmp_path / "mars").mkdir()
    done = subprocess.run(
        [EXAMPLES / "evaluate/evaluate.sh", "http://127.0.0.1:9"],
        cwd=ROOT,
        env={**os.environ, "OUTPUT": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and earlier.is_dir()
    assert f"error: OUTPUT={tmp_path} holds results of an earlier run; move them" in done.stderr


@pytest.mark.nightly
def test_theta_is_scored_without_a_bound_and_sampled(packaged_model, tmp_path):
    """Like the paper's experiments, over several seeds, on a server with an API key."""
    config = speculative_config(
        str(PACKAGED_HEAD), 3, rejection_sample_method="mars", mars_theta=0.9
    )
    output, task = tmp_path / "evaluate", EXAMPLES / "evaluate/first_sentence.yaml"
    env = {"OUTPUT": str(output), "HF_HOME": str(tmp_path / "cache"), "SEEDS": "5 6"}
    env["OPENAI_API_KEY"] = "sk-test"
    with packaged_server(packaged_model, config, tmp_path, "--api-key", "sk-test") as server:
        printed = run("evaluate/evaluate.sh", server.base_url, task, "--limit", 3, **env)
    requests = {}
    for path in output.rglob("samples_*.jsonl"):
        rule, seed = path.relative_to(output).parts[:2]
        answers = [json.loads(line) for line in path.read_text().splitlines()]
        requests[rule, seed] = [answer["arguments"]["gen_args_0"]["arg_1"] for answer in answers]
    assert requests.keys() == {(rule, seed) for rule in ("strict", "mars") for seed in ("5", "6")}
    for (rule, _), arguments in requests.items():
        xargs = {"mars_max_loss": 0} if rule == "strict" else {}
        assert [request["vllm_xargs"] for request in arguments] == [xargs] * 3
        assert {request["temperature"] for request in arguments} == {1}
    assert re.search(r"^\| first_sentence \| exact_match, none \| 3 \| ", printed, re.M)


@pytest.mark.nightly
def test_lm_eval_scores_both_rules_with_the_detectable_difference(opt_in_server, tmp_path):
    output = tmp_path / "evaluate"
    task = EXAMPLES / "evaluate/first_sentence.yaml"
    env = {"OUTPUT": str(output), "HF_HOME": str(tmp_path / "cache")}
    before = opt_in_server.metrics()
    printed = run("evaluate/evaluate.sh", opt_in_server.base_url, task, "--limit", 10, **env)
    spent = opt_in_server.metrics()["vllm:mars_lost_nats_total"]
    assert spent > before.get("vllm:mars_lost_nats_total", 0)
    row = re.search(r"^\| first_sentence \| exact_match, none \| (.*) \|$", printed, re.M)[1]
    questions, strict, mars, difference, changed = row.split(" | ")
    assert questions == "10" and int(changed) <= 10
    # Computed again from the answers.
    scores = {}
    for rule in ("strict", "mars"):
        (samples,) = (output / rule).rglob("samples_*.jsonl")
        answers = [json.loads(line) for line in samples.read_text().strip().split("\n")]
        assert all(answer["arguments"]["gen_args_0"]["arg_1"]["vllm_xargs"] for answer in answers)
        scores[rule] = sum(answer["exact_match"] for answer in answers) * 10
    assert (float(strict), float(mars)) == (scores["strict"], scores["mars"])
    low, high = map(float, re.search(r"\((\S+) to (\S+)\)", difference).groups())
    assert low <= float(difference.split()[0]) <= high
    half, needed = re.search(
        r"larger than about ([\d.]+) points.* about ([\d,]+),", printed
    ).groups()
    assert float(half) == pytest.approx((high - low) / 2, abs=0.11)
    assert int(needed.replace(",", "")) == pytest.approx(10 * float(half) ** 2, rel=0.01)


def test_a_load_is_measured_with_both_rules(opt_in_server):
    options = ("--num-prompts=4", "--max-concurrency=2", "--custom-output-len=24")
    printed = run("load.sh", opt_in_server.base_url, *options, "--num_warmups=0")
    # Options of the call replace those of the script.
    assert "duplicate keys" not in printed
    lost = [float(nats) for nats in re.findall(r"^Lost, in nats: (\S+)$", printed, re.M)]
    assert len(lost) == 2 and lost[0] == 0 < lost[1]
    assert re.findall(r"Successful requests: +(\d+)", printed) == ["4", "4"]
    for line in ("Total generated tokens", "Output token throughput", "Mean TPOT", "Mean E2EL"):
        assert printed.count(line) == 2, line
    lengths = [float(length) for length in re.findall(r"Acceptance length: +([\d.]+)", printed)]
    assert len(lengths) == 2 and 1 < lengths[0] < lengths[1]


# The first run installs LiteLLM by uvx.
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_gateway_allows_lossy_requests_by_team(packaged_model, tmp_path):
    ports = {"PORT": str(free_port()), "SERVER_PORT": str(free_port())}
    env = {**os.environ, **ports, "CHAT_KEY": "sk-chat", "BILLING_KEY": "sk-billing"}
    log = tmp_path / "gateway.log"
    url = f"http://127.0.0.1:{ports['PORT']}/v1"

    def client(key):
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0)

    def ask(key, **xargs):
        answer = client(key).chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": PROMPT}],
            temperature=0,
            max_tokens=48,
            extra_body={"vllm_xargs": xargs} if xargs else None,
        )
        return answer.choices[0].message.content

    with log.open("wb") as file:
        gateway = subprocess.Popen(
            [EXAMPLES / "gateway/run.sh"],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 600
        while True:
            assert gateway.poll() is None and time.monotonic() < deadline, log.read_text()
            try:
                strict = ask("sk-billing")
                break
            except openai.APIError:
                time.sleep(1)
        # Options of requests are replaced by those of the team.
        assert ask("sk-billing", mars_max_loss=0.02) == strict
        lossy = ask("sk-chat")
        assert lossy != strict
        assert ask("sk-chat", mars_max_loss=0) == lossy
        with pytest.raises(openai.AuthenticationError, match="This key belongs to no team"):
            ask("sk-other")
        # An entry of these would replace keys of a request whose first try fails.
        entry = {"model": "model", "max_tokens": 48, "vllm_xargs": {"mars_max_loss": 0.02}}
        for key in ("fallbacks", "context_window_fallbacks", "content_policy_fallbacks"):
            with pytest.raises(openai.BadRequestError, match=f"{key} is not among the keys"):
                client("sk-billing").chat.completions.create(
                    model="model",
                    messages=[{"role": "user", "content": PROMPT}],
                    max_tokens=10**6,
                    extra_body={key: [entry]},
                )
        # The server refuses direct requests, and the gateway other paths.
        direct = openai.OpenAI(
            base_url=f"http://127.0.0.1:{ports['SERVER_PORT']}/v1", api_key="sk-billing"
        )
        with pytest.raises(openai.AuthenticationError):
            direct.models.list()
        with pytest.raises(openai.PermissionDeniedError, match="/v1/responses is not one of"):
            client("sk-billing").responses.create(model="model", input="?")
        assert [model.id for model in client("sk-chat").models.list()] == ["model"]
    finally:
        os.killpg(gateway.pid, signal.SIGTERM)
        gateway.wait(60)


def steps_of(path):
    """Returns the head and the steps of a file of grpo_trl.py."""
    head, *steps = map(json.loads, path.read_text().splitlines())
    return head["run"], steps


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_trl_trains_on_rollouts_and_resumes(packaged_model, tmp_path):
    files = {name: tmp_path / f"{name}.jsonl" for name in ("strict", "mars", "unweighted")}
    small = ("--answers", 8, "--max-tokens", 24)
    for name, steps, options in (
        ("strict", 3, ("--rule", "strict")),
        ("mars", 5, ()),
        # Resumes from its checkpoint.
        ("mars", 6, ()),
        ("unweighted", 1, ("--no-weights",)),
    ):
        where = ("--steps", steps, "--output", files[name])
        run("grpo_trl.py", *where, *small, *options, timeout=1000)
    run_of, mars = steps_of(files["mars"])
    assert run_of["command"][-1:] and run_of["versions"]["trl"].startswith("1.")
    assert [step["step"] for step in mars] == [1, 2, 3, 4, 5, 6]
    _, strict = steps_of(files["strict"])
    ratio = "sampling/importance_sampling_ratio/"
    difference = "sampling/sampling_logp_difference/max"
    for step in (*strict, *mars):
        # The head still drafts well for changing weights.
        assert step["tokens_per_step"] > 1.2 and step["grad_norm"] > 0
        assert 0 < step["reward"] < 1 and step["seconds_per_answer"] > 0
    for step in strict:
        # With old weights of the trainer in vLLM the difference would be above 0.1.
        assert step[difference] < 0.005 and step["nats_per_token"] == 0
    for step in mars:
        assert step[difference] > 0.1 and 0 < step["nats_per_token"] <= 0.02 * 124 / 24
        assert step[ratio + "max"] <= 2 and 0.9 < step[ratio + "mean"] < 1.1
    (unweighted,) = steps_of(files["unweighted"])[1]
    assert ratio + "mean" not in unweighted and unweighted["nats_per_token"] > 0
