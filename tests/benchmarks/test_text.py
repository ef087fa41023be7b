"""`benchmarks.text`: figures known by hand, and a run on a tiny model."""

import gzip
import json
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks import figures, kinds, text, text_report
from engines import NGRAM, engine_in_process
from vllm_mars.kernels.interface import Column
from vllm_mars.options.config import split_speculative_config
from vllm_mars.options.requests import options_of
from vllm_mars.worker.records import record_of

POINT = {"model": "tiny", "draft": "ngram", "max_tokens": 9, "k": 4, "temperature": 1.0}


def call(name, tokens, lost=0.0, ratio=0.0):
    """A call with one answer to each prompt; prompts are of two kinds in turn.

    Args:
        tokens: of each answer.
    """
    answers = {
        "tokens": tokens,
        "steps": [4] * len(tokens),
        "ended": [1] * len(tokens),
        "weights": [count * math.exp(-ratio) for count in tokens],
        "drift": [0.0] * len(tokens),
        "repeated": [1] * len(tokens),
        "nll": [2.0 * count for count in tokens],
        "entropy": [1.5 * count for count in tokens],
    }
    prompts = [f"few/{('chat', 'code')[i % 2]}/{i}" for i in range(len(tokens))]
    head = {**POINT, "name": name, "seeds": [0], "prompts": prompts}
    return {**head, "lost": lost, "answers": answers}


@pytest.mark.parametrize("most", [1, 16])
def test_answers_are_scored_at_the_requests_temperature(tiny_model, most):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    texts = [([5, 9], [3, 8, 8, 7, 2]), ([4], [6]), ([1, 2, 3], [7, 9])]
    scores = text.score(model, texts, 0.7, most)
    for (prompt, answer), (nll, entropy) in zip(texts, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / 0.7
        p = logits.softmax(-1)
        p_answer = p[range(len(answer)), answer]
        assert nll == pytest.approx(-p_answer.log().sum().item(), rel=1e-4)
        assert entropy == pytest.approx((-p * p.log()).sum().item(), rel=1e-4)


# One step without a draft; the last step goes beyond the end; an engine without MARS.
@pytest.mark.parametrize(
    ("histogram", "steps", "report"),
    [([1, 0, 2], 4, {"loss_nats": [0.5, 0.25]}), ([0, 0, 4], 4, None)],
)
def test_steps_without_a_draft_count(histogram, steps, report):
    metrics = SimpleNamespace(histogram=histogram, mars=report)
    tokens = [1, 2, 3, 4, 1, 2, 3, 4, 1]
    answer = SimpleNamespace(token_ids=tokens, spec_decode_metrics=metrics, finish_reason="length")
    assert text.told(answer) == {
        "tokens": 9,
        "steps": steps,
        "ended": 0,
        "weights": 7 + math.exp(-0.5) + math.exp(-0.25) if report else 9,
        "nats": 0.75 if report else 0,
        "drift": 0.75 if report else 0,
        "repeated": 2,
    }


def test_rules_are_compared_with_strict_verification():
    lines = [call("strict", [5, 9, 7]), call("mars_price 0.3", [9, 13], 0.44, math.log(2))]
    strict, lossy = (
        dict(zip((title for title, *_ in text_report.COLUMNS), row, strict=True))
        for row in text_report.report(lines)
    )
    assert strict["rule"] == "strict" and lossy["rule"] == "mars_price 0.3"
    # 8 + 12 further tokens in 8 steps against 4 + 8.
    assert lossy["tokens per step"][0] == 2.5 and strict["tokens per step x strict"] is None
    assert lossy["tokens per step x strict"][0] == pytest.approx(20 / 12, abs=1e-5)
    assert lossy["nats lost per token"] == 0.02 and lossy["mean weight of a token"] == 0.5
    assert lossy["NLL less entropy"] == 0.5 and lossy["NLL less strict's"] == 0
    assert lossy["length x strict"][0] == pytest.approx(22 / 14, abs=1e-5)
    assert lossy["ended, %"] == 100 and lossy["ended less strict's, points"] == 0
    # 1 of 6 and 1 of 10.
    assert lossy["repeated 4-grams"][0] == pytest.approx(2 / 16, abs=1e-5)
    assert len(list(figures.table_of(text_report.COLUMNS, text_report.report(lines), "gain"))) == 4


def test_a_gain_where_answers_ended():
    """Only prompts whose answers ended by both rules count; a truncated answer is easy to draft."""
    lines = [call("strict", [5, 9, 7]), call("mars_price 0.3", [9, 13, 11])]
    column = [title for title, *_ in text_report.COLUMNS].index("where answers ended")
    lines[0]["answers"]["ended"], lines[1]["answers"]["ended"] = [1, 1, 0], [1, 0, 1]
    strict, lossy = text_report.report(lines)
    # 8 further tokens against 4, in as many steps.
    assert strict[column] is None and lossy[column] == 2
    lines[1]["answers"]["ended"] = [0, 0, 1]
    assert text_report.report(lines)[1][column] is None


def test_common_parameters_are_left_out():
    lines = [call("strict", [5, 9]), call("block", [5, 9])]
    more = [*lines, {**lines[0], "k": 8}]
    rows = text_report.report(more)
    assert [row[0] for row in rows] == ["K 4", "strict", "block", "K 8", "strict"]
    assert list(figures.table_of(text_report.COLUMNS, rows, "gain"))[2].startswith("| **K 4** |  |")


def test_a_heading_names_the_draft_if_a_model_has_several():
    line = call("strict", [5, 9])
    assert text_report.report([line, {**line, "model": "a", "draft": "b"}])[0] == ["a"]
    assert text_report.report([line, {**line, "draft": "b"}])[0] == ["b"]


class Words:
    """A tokenizer of a few words."""

    words = ("a", " B", ".", "\n", " c!", " ", "D")

    def __len__(self):
        return len(self.words)

    def batch_decode(self, texts):
        return ["".join(self.words[token] for token in tokens) for tokens in texts]


@pytest.mark.parametrize("sampled", [False, True])
def test_kinds_of_tokens(sampled):
    """The model's output is wider than the vocabulary."""
    tokens, reported = [0, 1, 2, 0, 1, 4], [0.0, 0.0, 0.5, 1.0, 1.0, -0.25]
    p = torch.tensor([0.3, 0.2, 0.1, 0.05, 0.25, 0.05, 0.05, 0.0]).expand(6, 8).clone()
    # The argmax at the last position completes a 2-gram and a 3-gram.
    p[5] = torch.tensor([0.1, 0.1, 0.5, 0.05, 0.2, 0.05, 0.0, 0.0])
    values = kinds.Kinds(Words(), 8, "cpu", {0, 2}).sums(tokens, reported, p.log(), sampled)
    sums = dict(zip(kinds.COLUMNS, values.tolist(), strict=True))
    again = [sums[f"2-grams again, {which}"] for which in kinds.SUMS]
    ends = [sums[f"sentence ends, {which}"] for which in kinds.SUMS]
    outside = [sums[f"not in the draft's vocabulary, {which}"] for which in kinds.SUMS]
    if not sampled:
        # Relaxed tokens have two B and one c!; the draft can propose every argmax.
        assert outside == [2, 2, 0]
        # Of four relaxed tokens "a B" comes again; the argmax tokens are a, a, a, ".".
        assert again == [1, 1, 1] and ends == [2, 2, 1]
        assert sums["3-grams again, by target"] == 1 and sums["3-grams again, served"] == 0
        return
    # Only "a B" comes again, and only after the second a or B.
    assert again == pytest.approx([1, math.exp(-1), 0.2 + 0.5])
    assert ends == pytest.approx([2, math.exp(-0.5) + math.exp(0.25), 5 * (0.1 + 0.25) + 0.7])
    assert sums["capitals, by target"] == pytest.approx(5 * 0.2 + 0.1)
    assert sums["line breaks, served"] == 0
    weights = 1 + math.exp(-1) + math.exp(0.25)
    assert outside == pytest.approx([3, weights, 5 * 0.6 + 0.4])


def test_kinds_against_the_target():
    lines = [call("strict", [5, 9]), call("mars_price 0.3", [10, 20])]
    for line, share in zip(lines, (1.0, 1.1), strict=True):
        for name in kinds.COLUMNS:
            scale = share if name.endswith("served") else 1
            line["answers"][name] = [scale * tokens / 5 for tokens in line["answers"]["tokens"]]
    assert text_report.report_of_tokens(lines, "strict")[1][3] == 1.0
    rows = text_report.report_of_tokens(lines, "mars_price 0.3")
    assert [row[0] for row in rows if len(row) == 1] == ["mars_price 0.3, K 4, temperature 1"]
    # 33 were emitted; the target expects 30 of 150 tokens.
    capitals = {row[0]: row[1:] for row in rows}["capitals"]
    assert capitals[:2] == [7, 20.0]
    assert capitals[2] == capitals[3] == pytest.approx(1.1)
    assert len(list(figures.table_of(text_report.OF_TOKENS, rows))) == 2 + len(rows)


def test_a_compressed_output_is_reported(tmp_path, capsys):
    lines = {"run": {"x": 1}}, call("strict", [5, 9])
    content = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    assert text.main([f"--report={tmp_path}/a.jsonl.gz", f"--figures={tmp_path}/few.json"]) == 0
    written = json.loads((tmp_path / "few.json").read_text())
    assert [row[:3] for row in written["rows"]] == [["strict", 2, 2]]
    assert written["runs"] == [{"x": 1, "raw": "text/a.jsonl.gz"}]
    assert "| strict | 2 | 2 |" in capsys.readouterr()[0]


@pytest.mark.parametrize(
    "rules",
    [
        ["mars_theta=0.9", "mars_price=0.3"],
        ["mars_theta=0.9"],
        ["strict", "block"],
        ["standard", "block"],
    ],
)
def test_some_rules_need_a_separate_call(rules, tmp_path, capsys):
    with pytest.raises(SystemExit):
        text.main(["--output", str(tmp_path / "out.jsonl"), "--rules", *rules])
    error = capsys.readouterr()[1]
    assert "mars_theta, standard and block each need a call without other rules" in error
    with pytest.raises(SystemExit):
        text.main(["--rules", *rules])
    assert "--output or --report is needed" in capsys.readouterr()[1]


@pytest.mark.engine
def test_it_measures_and_resumes(bytes_model, tmp_path, monkeypatch, capsys):
    prompts, output = tmp_path / "few.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": 9 * word, "category": "letters"} for word in ("abc", "wxyz")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(text, "MAX_MODEL_LEN", 128)
    command = [
        f"--model={bytes_model}",
        "--draft=ngram",
        f"--prompts={prompts}",
        f"--output={output}",
        "--block=1",
        "--answers=8",
        "--max-tokens=24",
        *("--temperatures", "0", "1"),
        *("--rules", "strict", "mars_max_loss=5"),
    ]
    with engine_in_process(bytes_model, {**NGRAM, **text.SERVERS["mars"]}) as llm:
        monkeypatch.setattr("vllm.LLM", lambda *_, **options: llm)
        assert text.main([*command, "--num-prompts=1"]) == 0
        # As after a kill.
        output.write_text(output.read_text() + '{"model": "ti')
        assert text.main(command) == 0
    written = [json.loads(line) for line in output.read_text().splitlines()]
    calls = [line for line in written if "run" not in line]
    assert len(calls) == 2 * 2 * 2 and len(written) == len(calls) + 2
    assert {call["prompts"][0] for call in calls} == {"few/letters/1", "few/letters/2"}
    for call in calls:
        answers, lost = call["answers"], call["lost"]
        assert len(answers["steps"]) == (8 if call["temperature"] else 1)
        assert all(1 <= s < n for s, n in zip(answers["steps"], answers["tokens"], strict=True))
        if call["name"] == "strict":
            assert lost == 0 and answers["weights"] == answers["tokens"]
            assert not any(answers["drift"])
        elif call["temperature"] == 0:
            assert sum(answers["drift"]) == pytest.approx(lost, abs=1e-3)
    assert sum(call["lost"] for call in calls if call["temperature"]) > 0
    assert text.main(["--report", str(output), f"--figures={tmp_path}/new.json"]) == 0
    assert "| mars_max_loss 5 | 2 | 16 |" in capsys.readouterr()[0]
    file = json.loads((tmp_path / "new.json").read_text())
    assert len(file["rows"]) == 6
    assert {run["raw"] for run in file["runs"]} == {"text/out.jsonl"}


def test_a_requested_bound_equals_that_of_a_server():
    from vllm import SamplingParams

    loose, _ = split_speculative_config(text.SERVERS["mars"])
    bounded, _ = split_speculative_config({**text.SERVERS["mars"], "mars_max_loss": 0.02})
    assert (loose.opening, loose.repeat_ngram) == (bounded.opening, bounded.repeat_ngram)
    assert loose.draft_share == bounded.draft_share != 1

    def record(server, **extra_args):
        params = SamplingParams(temperature=1, extra_args=extra_args)
        return record_of(options_of(params, server), params, server, True, 99)

    assert record(loose, mars_max_loss=0.02) == record(bounded)
    strict = record(loose, **text.asked("strict"))
    assert strict[Column.VALUE] == strict[Column.RATE] == 0
