"""A sweep over a task of lm-eval, which asks a real server for the answers and scores them."""

import json

import pytest
import yaml

from vllm_mars.cli import main
from vllm_mars.experiments.quality.task_client import read_answers, run_task
from vllm_mars.experiments.report.page import write_report
from vllm_mars.experiments.sweep.datasets import load_dataset
from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.summary import rows

PROMPTS = ["w20 w21 w22 w20 w21 w22 w20 w21", "w30 w31 w30 w31", "w40 w41 w42 w40"]


def write_task(directory, targets):
    """A task of lm-eval whose documents want these answers."""
    documents = [{"text": p, "target": t} for p, t in zip(PROMPTS, targets, strict=True)]
    path = directory / "documents.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {
        "task": "echo",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": []},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (directory / "echo.yaml").write_text(yaml.safe_dump(task))
    return f"lm-eval:{directory / 'echo.yaml'}"


def sweep(model, output, dataset, *arguments):
    status = main(
        [
            *("sweep", "--model", str(model), "--prompts", dataset),
            *("--output", str(output), "--temperature", "0", "--concurrency", "2"),
            *("--gap", "--price", "--no-unprotected", "--repeats", "1", "--num-prompts", "0"),
            *("--max-tokens", "12", "--server-arg=--max-model-len=256", *arguments),
        ]
    )
    assert status == 0
    return read_cells(output)


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_lm_eval_asks_and_scores(tiny_model, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    dataset = write_task(tmp_path, ["?", "?", "?"])
    (plain,) = sweep(tiny_model, tmp_path / "plain.jsonl", dataset, "--method", "autoregressive")
    texts = [answer.text for answer in plain.task_answers]
    assert len(texts) == 3 and all(texts) and plain.acceptance is None and plain.speed is None
    assert plain.quality.estimate("exact_match,none").value == 0

    # Two documents whose answers are right by definition, one that is wrong.
    write_task(tmp_path, [*texts[:2], "?"])
    run = tmp_path / "run.jsonl"
    cells = sweep(
        *(tiny_model, run, dataset, "--theta", "0.3", "1", "--reference-theta", "0.3"),
        *("--method", "autoregressive", "standard", "mars"),
    )
    by_rule = {row.key.rule: row for row in rows(cells)}
    assert set(by_rule) == {"autoregressive", "standard", "mars 0.3", "mars 1"}
    for rule in ("autoregressive", "standard", "mars 1"):
        score = by_rule[rule].estimate("exact_match,none")
        assert score.value == pytest.approx(2 / 3) and score.samples == 3
    strict = by_rule["mars 1"]
    assert strict.estimate("agreement").value == 1
    assert strict.estimate("exact_match,none").recovery == 1
    assert strict.tokens_per_second is None and strict.speedup is None
    for cell in cells:
        assert (cell.acceptance is None) == (cell.key.method == "autoregressive")
        command = " ".join(cell.client_command)
        assert str(tiny_model) not in command and "local-chat-completions" in command
        assert '"seed": null' in command
        asked = f'"vllm_xargs": {{"mars_theta": {cell.key.theta}}}' in command
        assert asked == (cell.key.method == "mars")
        if cell.acceptance:
            assert sum(cell.acceptance.accepted_by_position) == cell.acceptance.accepted_tokens
            assert cell.acceptance.drafts > 0
    write_report([run], tmp_path / "report.html")
    assert "exact_match,none" in (tmp_path / "report.html").read_text()


def test_an_answer_with_a_line_separator_is_one_line(tmp_path):
    sample = {"doc_id": 0, "resps": [["a\u2028b"]], "filter": "none"}
    # BLEU is of all answers together: lm-eval keeps what it will need of each.
    sample |= {"metrics": ["exact_match", "bleu"], "bleu": ["right", "a"]}
    (tmp_path / "results_1.json").write_text(
        '{"higher_is_better": {"echo": {"exact_match": true, "bleu": true}}}'
    )
    (tmp_path / "samples_echo_2.jsonl").write_text(
        json.dumps({**sample, "exact_match": 1.0}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (answer,) = read_answers(tmp_path)
    assert (answer.text, answer.scores) == ("a\u2028b", {"exact_match,none": 1.0})


def test_a_task_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.yaml: there is no such file"):
        load_dataset(f"lm-eval:{tmp_path}/none.yaml", 0)
    with pytest.raises(ValueError, match="names no task"):
        load_dataset("lm-eval:", 0)
    with pytest.raises(RuntimeError, match="holds no samples of lm-eval"):
        read_answers(tmp_path)


@pytest.mark.nightly
def test_what_lm_eval_cannot_do_is_named(tmp_path):
    config = {"model": "local-chat-completions", "tasks": ["no-such-task"]}
    with pytest.raises(RuntimeError, match="lm-eval ended with status 1"):
        run_task(config, tmp_path, tmp_path / "log", 120)
    with pytest.raises(RuntimeError, match=r"took longer than cell_timeout=0\.01 s"):
        run_task(config, tmp_path, tmp_path / "log", 0.01)
    with pytest.raises(RuntimeError, match="holds no samples of lm-eval"):
        read_answers(tmp_path)
