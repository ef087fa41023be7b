"""What `benchmarks.text` says of answers, by hand and on a tiny model."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks import figures, text
from engines import NGRAM, engine_in_process
from vllm_mars.config import split_speculative_config
from vllm_mars.kernels.terms import Column, float_bits
from vllm_mars.runner.records import record_of

POINT = {"model": "tiny", "draft": "ngram", "k": 4, "max_tokens": 9, "temperature": 1.0}
ANSWER = {"seed": 0, "steps": 4, "ended": 1, "drift": 0.0, "grams": 4, "repeated": 1}


def call(name, tokens, lost=0.0, ratio=0.0):
    """One with an answer of so many tokens to each prompt."""
    answers = [
        {**ANSWER, "prompt": str(at), "tokens": own, "weights": own * math.exp(-ratio)}
        | {"nll": 2.0 * own, "entropy": 1.5 * own, "close": 1, "odds": 0.5}
        for at, own in enumerate(tokens)
    ]
    return {**POINT, "name": name, "lost": lost, "answers": answers}


def test_an_answer_is_scored_at_the_requests_temperature(tiny_model, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(text, "CHUNK", 3)
    model, tokens = AutoModelForCausalLM.from_pretrained(tiny_model), [5, 9, 3, 8, 8, 7, 2]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, 1:-1] / 0.7
    p = logits.softmax(-1)
    top = logits.topk(2).values
    close = (top[:, 0] > 0) & (top[:, 1] > 0.9 * top[:, 0])
    found = text.score(model, tokens[:2], tokens[2:], 0.7)
    assert found["nll"] == pytest.approx(-p[range(5), tokens[2:]].log().sum().item(), rel=1e-4)
    assert found["entropy"] == pytest.approx((-p * p.log()).sum().item(), rel=1e-4)
    assert found["close"] == close.sum()
    odds = p.topk(2).values
    assert found["odds"] == pytest.approx((odds[:, 1] / odds[:, 0])[close].sum().item(), rel=1e-4)


# One step without a draft; the last step reaches behind the end.
@pytest.mark.parametrize(("histogram", "steps"), [([1, 0, 2], 4), ([0, 0, 4], 4)])
def test_steps_without_a_draft_count(histogram, steps):
    metrics = SimpleNamespace(histogram=histogram, mars={"loss_nats": [0.5, 0.25]})
    tokens = [1, 2, 3, 4, 1, 2, 3, 4, 1]
    given = SimpleNamespace(token_ids=tokens, spec_decode_metrics=metrics, finish_reason="length")
    assert text.told(given) == {
        **{
            "tokens": 9,
            "steps": steps,
            "ended": 0,
            "log_ratio": 0.75,
            "drift": 0.75,
            "weights": math.exp(-0.5) + math.exp(-0.25),
        },
        **{"grams": 6, "repeated": 2},
    }


def test_rules_stand_beside_strict_verification_of_the_same_prompts():
    lines = [call("strict", [5, 9, 7]), call("mars_price 0.3", [9, 13], 0.44, math.log(2))]
    (strict, lossy), words = text.report(lines)
    assert strict[0] == "strict" and lossy[0] == "mars_price 0.3"
    more = [*lines, {**lines[0], "k": 8}]
    assert [row[0] for row in text.report(more)[0][::2]] == ["K 4: strict", "K 8: strict"]
    # 8 + 12 further tokens in 8 steps beside 4 + 8.
    assert lossy[1][0] == 2.5 and lossy[2][0] == pytest.approx(20 / 12, abs=1e-5)
    assert strict[2] is None and lossy[3] == 0.02 and lossy[4] == 0.5
    assert lossy[6] == 0 and lossy[7] == 0.5 and lossy[8][0] == pytest.approx(22 / 14, abs=1e-5)
    assert lossy[9] == 0 and lossy[10] == 0.25
    assert not words, "theta is told of greedy answers"
    assert len(list(figures.table_of(text.COLUMNS, [strict, lossy]))) == 4


@pytest.mark.parametrize("rules", [["mars_theta=0.9", "mars_price=0.3"], ["mars_theta=0.9"]])
def test_theta_needs_an_engine_of_its_own_and_fixed_drafts(rules, tmp_path, capsys):
    with pytest.raises(SystemExit):
        text.main(["--output", str(tmp_path / "out.jsonl"), "--rules", *rules])
    assert (
        "mars_theta needs a call without other rules, and --fixed-drafts" in capsys.readouterr()[1]
    )


@pytest.mark.engine
def test_it_measures_and_goes_on(bytes_model, tmp_path, monkeypatch, capsys):
    prompts, output = tmp_path / "few.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": 9 * word}) + "\n" for word in ("abc", "wxyz")))
    monkeypatch.setattr(text, "MAX_MODEL_LEN", 128)
    command = [f"--model={bytes_model}", "--draft=ngram", f"--prompts={prompts}", "--block=1"]
    command += ["--temperatures", "0", "1", "--max-tokens=24", "--answers=8", f"--output={output}"]
    command += ["--rules", "mars_max_loss=5"]
    with engine_in_process(bytes_model, {**NGRAM, **text.SERVERS[False]}) as llm:
        monkeypatch.setattr("vllm.LLM", lambda *_, **options: llm)
        assert text.main([*command, "--num-prompts=1"]) == 0
        # As if it had been killed.
        output.write_text(output.read_text() + '{"model": "ti')
        assert text.main([*command, f"--figures={tmp_path}/new.json"]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    calls = [line for line in lines if "run" not in line]
    assert len(calls) == 2 * 2 * 2 and len(lines) == len(calls) + 2
    assert all(1 <= it["steps"] < it["tokens"] for of in calls for it in of["answers"])
    for of in calls:
        told = [sum(it[name] for it in of["answers"]) for name in ("log_ratio", "drift")]
        if of["name"] == "strict":
            assert of["lost"] == 0 and told == [0, 0]
        elif of["temperature"] == 0:
            assert told == [pytest.approx(of["lost"], abs=1e-3)] * 2
    assert sum(of["lost"] for of in calls if of["temperature"]) > 0
    assert "| mars_max_loss 5 |" in capsys.readouterr()[0]
    written = json.loads((tmp_path / "new.json").read_text())
    assert len(written["rows"]) == 4 and {run["raw"] for run in written["runs"]} == {"out.jsonl"}


def test_a_request_is_as_on_a_server_with_its_bound():
    from vllm import SamplingParams

    loose, bounded = (
        split_speculative_config(own)[0]
        for own in (text.SERVERS[False], {**text.SERVERS[False], "mars_max_loss": 0.02})
    )
    assert (loose.opening, loose.repeat_ngram) == (bounded.opening, bounded.repeat_ngram)
    assert loose.draft_share == bounded.draft_share != 1

    def record(server, **own):
        return record_of(SamplingParams(temperature=1, extra_args=own), server, 99)

    assert record(loose, mars_max_loss=0.02) == record(bounded)
    strict = record(loose, **text.STRICT["strict"])
    assert strict[Column.PRICE] == strict[Column.RATE] == 0
    assert strict[Column.DRAFT_SHARE] == float_bits(1.0), "at the request's own temperature"
