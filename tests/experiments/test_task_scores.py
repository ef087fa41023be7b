"""Task scores: lm-eval against two servers, as docs/measuring.md has it."""

import json
import subprocess
import sys

import pytest

from vllm_mars.local.drafts import speculative_config
from vllm_mars.local.server import VllmServer
from vllm_mars.local.vllm_args import CPU_ENV, server_args

PROMPTS = ["w20 w21 w22 w20 w21 w22 w20 w21", "w30 w31 w30 w31", "w40 w41 w42 w40"]
# A task is a file of YAML, and JSON is YAML.
TASK = {
    **{"task": "echo", "dataset_path": "json", "test_split": "test"},
    **{"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{target}}"},
    "generation_kwargs": {"until": []},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def lm_eval(server, directory, name, targets):
    """Scores and answers of a task whose documents want these answers."""
    documents = [{"text": p, "target": t} for p, t in zip(PROMPTS, targets, strict=True)]
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(path)}}}
    (directory / f"{name}.yaml").write_text(json.dumps(task))
    model = {"model": server.model, "base_url": f"{server.base_url}/v1/chat/completions"}
    model |= {"num_concurrent": 2, "max_retries": 1, "tokenized_requests": False}
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "local-chat-completions"),
        *("--model_args", ",".join(f"{key}={value}" for key, value in model.items())),
        *("--tasks", str(directory / f"{name}.yaml"), "--apply_chat_template", "--log_samples"),
        *("--gen_kwargs", "temperature=0,max_gen_toks=12"),
        *("--output_path", str(directory / name)),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr
    (results,) = (directory / name).rglob("results_*.json")
    (samples,) = (directory / name).rglob("samples_*.jsonl")
    answers = [json.loads(line) for line in samples.read_text().rstrip("\n").split("\n")]
    score = json.loads(results.read_text())["results"]["echo"]["exact_match,none"]
    return score, [it["resps"][0][0] for it in sorted(answers, key=lambda it: it["doc_id"])]


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_lm_eval_asks_and_scores_both_servers(tiny_model, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    scores = {}
    for name, options in (("strict", {}), ("lossy", {"mars_theta": 0.3})):
        if options:
            options["rejection_sample_method"] = "mars"
        config = speculative_config("ngram", 4, **options)
        args = [*server_args(True), "--speculative-config", json.dumps(config)]
        with VllmServer(
            tiny_model,
            [*args, "--max-model-len", "256"],
            log_path=tmp_path / f"{name}.log",
            env=CPU_ENV,
        ) as server:
            if name == "strict":
                score, answers = lm_eval(server, tmp_path, "plain", ["?", "?", "?"])
                assert score == 0 and all(answers)
            scores[name], _ = lm_eval(server, tmp_path, name, [*answers[:2], "?"])
    assert scores["strict"] == pytest.approx(2 / 3)
    assert 0 <= scores["lossy"] <= 2 / 3 + 1e-9
