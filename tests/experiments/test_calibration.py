"""`vllm-mars calibrate` on a tiny model, and `"auto:FILE"` in the speculative config."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny_models
from vllm_mars.calibration import (
    draft_facts,
    draft_of,
    identify,
    read_calibration,
    resolve_auto,
)
from vllm_mars.cli import main
from vllm_mars.config import METRICS, OPTION, STRICT, split_speculative_config
from vllm_mars.experiments.calibrate.losses import Measure, recovery, scores
from vllm_mars.experiments.calibrate.offline import offline_engine
from vllm_mars.experiments.calibrate.options import CalibrateOptions
from vllm_mars.experiments.calibrate.search import confirm, load_tasks, run_calibrate
from vllm_mars.experiments.sweep.datasets import Item
from vllm_mars.local.drafts import NGRAM_CONFIG
from vllm_mars.local.prompts import Prompt
from vllm_mars.weights import weights_checksum

NGRAM = {**NGRAM_CONFIG, "num_speculative_tokens": 4}
MARS = {**NGRAM, "rejection_sample_method": "mars"}


def config_of(directory):
    from vllm.config import ModelConfig

    return ModelConfig(str(directory), dtype="float32")


@pytest.fixture(scope="module")
def model_config(tiny_model):
    return config_of(tiny_model)


def resolved(model, speculative_config):
    """What the workers get of these options."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        speculative_config=speculative_config,
    ).create_engine_config()
    return config.additional_config["mars"]


def prompt_lines(count):
    """Prompts that repeat themselves, so that ngram drafts are made."""
    words = random.Random(0)
    for _ in range(count):
        phrase = " ".join(f"w{words.randrange(5, 512)}" for _ in range(6))
        yield json.dumps({"turns": [f"{phrase} {phrase}", phrase]}) + "\n"


@pytest.fixture(scope="module", params=["ratio", "price"])
def calibrated(request, tiny_model, tmp_path_factory):
    """The command on the tiny model: the metric, its file and its output."""
    directory = tmp_path_factory.mktemp("calibrated")
    (directory / "prompts.jsonl").write_text("".join(prompt_lines(12)))
    output = directory / "out" / "calibration.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm_mars.cli", "calibrate", str(tiny_model)),
            *("--prompts", str(directory / "prompts.jsonl"), "--output", str(output)),
            *("--budget", "0.0004", "--max-tokens", "24", "--server-arg=--max-model-len=256"),
            *("--metric", request.param),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=540)
    finally:
        # Its engine too, were it not finished in time.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    return request.param, output, printed


@pytest.mark.nightly
@pytest.mark.engine
def test_calibrate(tiny_model, calibrated):
    metric, path, printed = calibrated
    content = read_calibration(path)
    assert (content["metric"], content["budget"]) == (metric, 0.0004)
    assert content["model"]["weights"] == weights_checksum(tiny_model)
    assert content["weights"] == {"model": weights_checksum(tiny_model), "draft": None}
    assert content["draft"] == draft_facts(NGRAM)
    assert content["samples"]["recorded_prompts"] == content["samples"]["held_out_prompts"] == 6
    assert content["samples"]["recorded_positions"] > 50
    assert content["versions"]["vllm"]

    curve = content["curve"]
    costs = [point["cost"] for point in curve]
    assert costs == sorted(costs, reverse=True), "a looser threshold costs more"
    lengths = [point["acceptance_length"] for point in curve]
    assert lengths == sorted(lengths, reverse=True), "and accepts more"
    assert costs[0] > content["budget"] > costs[-1] == 0
    tries = content["confirmations"]
    assert all(not item["kept"] for item in tries[:-1])
    strict = STRICT.value(metric)
    assert tries[-1]["kept"] or content["threshold"] == strict
    assert content["threshold"] in {strict, tries[-1]["threshold"]}
    for item in tries:
        # The tokens' cost was predicted on other prompts.
        assert item["cost"]["value"] == pytest.approx(item["predicted"], abs=0.05)
        assert item["cost"]["low"] <= item["cost"]["value"] <= item["cost"]["high"]
    margins = content["margins"]
    assert sum(margins["runner_up"]) < sum(margins["positions"])
    assert f'"{OPTION[metric]}": "auto:{path}"' in printed
    assert "held-out prompts" in printed

    # The whole way: what was written is what a server takes.
    auto = {"mars_metric": metric, OPTION[metric]: f"auto:{path}"}
    options = resolved(tiny_model, {**MARS, **auto})
    assert options[METRICS[metric]] == content["threshold"]


@pytest.mark.nightly
@pytest.mark.engine
def test_a_task_score_as_budget(tiny_model, tmp_path, monkeypatch):
    """Tasks whose right answers are the strict ones, but for one that strict fails too."""
    # Two engines at a time, each with a core process of its own.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    prompts = [json.loads(line)["turns"][0] for line in prompt_lines(16)]
    asked = [Prompt(str(number), "", (text,)) for number, text in enumerate(prompts)]
    settings = {"max_tokens": 24, "engine_args": ("--max-model-len=256",)}
    model = str(tiny_model)
    tasks, output = tmp_path / "tasks.jsonl", tmp_path / "calibration.json"
    environment = dict(os.environ)

    def last_number(text):
        return text.rsplit("w", 1)[1]

    with offline_engine(CalibrateOptions(**settings), model, "cpu") as engine:
        right = [last_number(item.texts[0]) for item in engine.lead(asked, 1.0)]
        right[1] = "-1"
        lines = zip(prompts, right, strict=True)
        tasks.write_text(
            "".join(json.dumps({"prompt": p, "answer": f"#### {n}"}) + "\n" for p, n in lines)
        )
        result = run_calibrate(
            CalibrateOptions(
                model=model,
                recovery=0.7,
                min_solved=7,
                prompts=tasks,
                output=output,
                **settings,
            )
        )
        content = read_calibration(output)
        assert (content["budget"], content["recovery"]) == (None, 0.7)
        assert content["samples"]["solved_prompts"] == 7
        tried = {item.threshold: item for item in result.confirmations}
        held_out = asked[1::2]
        for theta, item in tried.items():
            answers = [last_number(one.texts[0]) for one in engine.lead(held_out, theta)]
            same = sum(a == b for a, b in zip(answers, right[1::2], strict=True))
            assert item.recovery.value == pytest.approx(same / (len(held_out) - 1))
            assert item.kept == (item.recovery.kept_share >= 0.9)
        # Where strict decoding does none of the tasks, nothing is tried.
        failed = [replace(task, answer="-1") for task in load_tasks(tasks).values()]
        questions = [Prompt(task.id, "", (task.prompt,)) for task in failed]
        with pytest.raises(ValueError, match="solves 0 of the 16 held-out tasks; fewer than"):
            confirm(engine, result, questions, {task.id: task for task in failed}, print)
    # vLLM ends the core processes and leaves it to whoever started them to wait.
    for child in multiprocessing.active_children():
        child.join(60)
    assert len(tried) > 1 and not all(item.kept for item in tried.values())
    # No looser one that was tried keeps it.
    kept = [theta for theta, item in tried.items() if item.kept]
    assert content["threshold"] == min([*kept, 1.0])
    assert os.environ == environment, "what the engine needs is not left to others"


def test_recovery_of_known_scores():
    strict, relaxed = np.array([1.0, 1, 0, 1]), np.array([1.0, 0, 1, 1])
    assert recovery(strict, strict, 1.0) == Measure(1.0, 1.0, 1.0, 1.0)
    left = recovery(relaxed, strict, 0.9)
    assert left.value == 1.0 and left.low < 1 < left.high and 0 < left.kept_share < 1
    assert recovery(0 * strict, strict, 0.1).kept_share < 0.01


def test_a_task_is_done_where_all_of_its_checks_pass():
    task = Item("n", "", "n?", schema={"required": ["n"]}, expected={"n": 1})
    answers = [
        Namespace(prompt=Namespace(id="n"), texts=[text]) for text in ('{"n": 1}', '{"n": 2}', "1")
    ]
    assert scores(answers, {"n": task}).tolist() == [1, 0, 0]


def test_a_recovery_that_rests_on_few_tasks_is_refused(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}", "answer": "#### 1"}}\n' for n in range(59)))
    message = "solves at most 29 of the 29 held-out tasks; fewer than min_solved=30 cannot show"
    with pytest.raises(ValueError, match=message):
        run_calibrate(CalibrateOptions(recovery=0.9, prompts=path))
    with pytest.raises(ValueError, match="min_solved=0 is below 1"):
        CalibrateOptions(min_solved=0)


def test_recovery_needs_tasks_that_strict_decoding_does(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "prompt": "x", "answer": "#### 1"}\n{"id": "b", "prompt": "x"}')
    with pytest.raises(ValueError, match="'b' has nothing to score its answer by, which recovery"):
        load_tasks(path)


def write(tmp_path, model_config, /, **changes):
    """A calibration of the model, with some entries changed; None leaves one out."""
    content = {
        "kind": "calibration",
        "schema": 1,
        "metric": "ratio",
        "threshold": 0.97,
        "model": identify(model_config),
        "draft": {"name": "ngram", "num_speculative_tokens": 4},
    } | changes
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({name: it for name, it in content.items() if it is not None}))
    return path


def test_auto_reaches_the_workers_as_a_number(tmp_path, tiny_model, model_config):
    path = write(tmp_path, model_config)
    options = resolved(tiny_model, {**MARS, "mars-theta": f"auto:{path}", "mars_theta_min": 0.9})
    assert (options["theta"], options["theta_min"]) == (0.97, 0.9)


def test_auto_is_the_limit_of_what_requests_may_choose(tmp_path, tiny_model, model_config):
    from vllm import SamplingParams

    from vllm_mars import MarsConfig
    from vllm_mars.requests import options_of

    path = write(tmp_path, model_config)
    options = resolved(tiny_model, {**MARS, "mars_theta": f"auto:{path}"})
    with pytest.raises(ValueError, match="mars_theta=0.96 is below this server's own 0.97, "):
        options_of(SamplingParams(extra_args={"mars_theta": 0.96}), MarsConfig.from_json(options))


@pytest.mark.parametrize("metric", ["gap", "price"])
def test_auto_takes_nats(tmp_path, model_config, metric):
    path = write(tmp_path, model_config, metric=metric, threshold=0.4)
    given = {**MARS, "mars_metric": metric, f"mars_{metric}": f"auto:{path}"}
    assert resolve_auto(given, model_config) == ({**given, f"mars_{metric}": 0.4}, [])
    assert given[f"mars_{metric}"].startswith("auto:"), "the user's dict stays as it is"


def test_the_model_may_be_elsewhere(tmp_path, tiny_model, model_config):
    """The weights decide, not where they lie."""
    path = write(tmp_path, model_config)
    (tmp_path / "elsewhere").symlink_to(tiny_model)
    given = {**MARS, "mars_theta": f"auto:{path}"}
    options, notes = resolve_auto(given, config_of(tmp_path / "elsewhere"))
    assert (options["mars_theta"], notes) == (0.97, [])


def test_another_draft_is_noted(tmp_path, model_config):
    path = write(tmp_path, model_config, draft={"name": "my-head", "num_speculative_tokens": 7})
    _, (note,) = resolve_auto({**MARS, "mars_theta": f"auto:{path}"}, model_config)
    assert "the draft's name my-head, num_speculative_tokens 7, but this server has" in note


def test_other_lengths_of_ngram_are_another_draft(tmp_path, model_config):
    """vLLM looks 5 up where the dict names no length."""
    here = draft_facts(NGRAM)
    assert (here["prompt_lookup_min"], here["prompt_lookup_max"]) == (1, 4)
    path = write(tmp_path, model_config, draft=here)
    given = {**MARS, "mars_theta": f"auto:{path}"}
    assert resolve_auto(given, model_config)[1] == []
    given = {name: value for name, value in given.items() if "lookup" not in name}
    (note,) = resolve_auto(given, model_config)[1]
    assert (
        "prompt_lookup_min 1, prompt_lookup_max 4, but this server has prompt_lookup_min 5" in note
    )
    # Named by --spec-method and its like, or K as the draft brings it.
    (note,) = resolve_auto({**given, "method": None}, model_config)[1]
    assert "the draft was not compared, since options outside the dict name it" in note
    given = {**MARS, "mars_theta": f"auto:{path}", "num_speculative_tokens": None}
    assert resolve_auto(given, model_config)[1] == []


def test_weights_that_were_not_compared_are_noted(tmp_path, model_config):
    identity = {**identify(model_config), "name": "on-a-hub", "weights": None}
    path = write(tmp_path, model_config, model=identity)
    _, (note,) = resolve_auto({**MARS, "mars_theta": f"auto:{path}"}, model_config)
    assert "calibrated on 'on-a-hub'; the weights of this server's" in note


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "sweep"}, "is not a calibration; give a file that `vllm-mars calibrate` wrote"),
        ({"schema": 2}, "has schema 2, not 1; calibrate again with this release"),
        ({"threshold": None}, "lacks threshold; give a file"),
        ({"model": None, "draft": None}, "lacks model, draft"),
        ({"model": "tiny"}, " model is not a JSON object"),
        ({"metric": "entropy"}, "has metric 'entropy', not one of ratio, gap, price"),
        ({"threshold": 1.7}, r"holds a bad threshold: mars_theta=1.7 is outside \(0, 1\]"),
        ({"threshold": "0.9"}, "holds a bad threshold: mars_theta='0.9' is a str"),
        (
            {"metric": "gap", "threshold": 0.5},
            'is a calibration of metric \'gap\'; write "mars_metric": "gap", "mars_gap": "auto:',
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path, model_config, changes, message):
    path = write(tmp_path, model_config, **changes)
    with pytest.raises(ValueError, match=f"^mars_theta='auto:{path}'.{message}"):
        resolve_auto({**MARS, "mars_theta": f"auto:{path}"}, model_config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: .*No such file.*; give a file"),
        ("{", "is not JSON"),
        ("[]", "is not a"),
    ],
)
def test_a_file_that_is_none(tmp_path, model_config, content, message):
    path = tmp_path / "calibration.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"mars_theta='auto:{path}' {message}"):
        resolve_auto({**MARS, "mars_theta": f"auto:{path}"}, model_config)


def test_another_training_of_the_model(tmp_path, model_config):
    """Same architecture, other weights."""
    path = write(tmp_path, model_config)
    other = tmp_path / "other"
    tuned = tiny_models.llama(other)
    with torch.no_grad():
        tuned.model.layers[1].mlp.down_proj.weight.mul_(1.001)
    tuned.save_pretrained(other)
    message = (
        "was calibrated on another model than 'other': 'tiny' differs in weights. A "
        "threshold fits one model: run `vllm-mars calibrate` on this one, or write the number 0.97"
    )
    with pytest.raises(ValueError, match=message):
        resolve_auto({**MARS, "mars_theta": f"auto:{path}"}, config_of(other))


def test_another_architecture(tmp_path, model_config):
    facts = {"name": "big", "architectures": ["LlamaForCausalLM"], "vocab_size": 512}
    facts |= {"hidden_size": 4096, "num_hidden_layers": 2, "weights": None}
    path = write(tmp_path, model_config, model=facts)
    with pytest.raises(ValueError, match="'big' differs in hidden_size 4096 and not 128"):
        resolve_auto({**MARS, "mars_theta": f"auto:{path}"}, model_config)


def test_auto_without_the_method(tmp_path, model_config):
    given = {**NGRAM, "mars_theta": "auto:x"}
    assert resolve_auto(given, model_config) == (given, [])
    with pytest.raises(ValueError, match="mars_theta='auto:x' is given, but rejection_sample_me"):
        split_speculative_config(given)


def test_a_request_cannot_name_a_file():
    from vllm import SamplingParams

    from vllm_mars import MarsConfig
    from vllm_mars.requests import options_of

    with pytest.raises(ValueError, match="mars_theta='auto:x' is a str, but must be a number"):
        options_of(SamplingParams(extra_args={"mars_theta": "auto:x"}), MarsConfig())


def test_draft_names():
    assert draft_of(NGRAM) == "ngram"
    assert draft_of({"method": "eagle3", "model": "/models/my-head/"}) == "my-head"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "budget=0.0 is outside (0, inf); give nats per token, such as 0.01"),
        (["--budget", "nan"], "budget=nan is outside"),
        (["--recovery", "98"], "recovery=98.0 is outside (0, 1]; give a share of the strict"),
        (["--metric", "entropy"], "metric='entropy' is not one of ratio, gap"),
        (["--max-tokens", "0"], "max_tokens=0 is below 1"),
        (["--min-solved", "3"], "min_solved=3 belongs to --recovery; give both or neither"),
        (["--server-arg=--speculative-config={}"], "names a draft; give it with --draft and"),
        (
            ["--recovery", "0.9", "--prompts", "lm-eval:gsm8k"],
            "prompts=lm-eval:gsm8k is no file; recovery needs JSON lines with tasks",
        ),
        (["--num-speculative-tokens", "0"], "num_speculative_tokens=0 is below 1"),
        (["--prompts", "none.jsonl"], "prompts=none.jsonl cannot be read"),
        (["--output", "/proc/none/it.json"], "output=/proc/none/it.json cannot be written"),
    ],
)
def test_bad_values_fail_before_anything_starts(arguments, message, capsys):
    assert main(["calibrate", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_one_prompt_is_not_enough(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}')
    assert main(["calibrate", "--prompts", str(tmp_path / "p.jsonl")]) == 1
    assert "holds one prompt; two or more are needed" in capsys.readouterr().err


def test_the_lock_refuses(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_MARS_LOCK", "strict")
    assert main(["calibrate"]) == 1
    assert "VLLM_MARS_LOCK=strict forbids lossy verification" in capsys.readouterr().err
