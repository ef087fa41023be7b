"""`vllm-mars tune`: what is dropped, what is put together, and a real run on a tiny model."""

import json
import re

import pytest

from sweep_files import NGRAM, turn
from vllm_mars import cli
from vllm_mars.experiments import tune
from vllm_mars.experiments.plan import Cell
from vllm_mars.experiments.records import read_sweep

ONE, MANY = (1.0, 1), (1.0, 16)
# Seconds per token of each candidate at one request and at many.
PACES = {
    "no drafts": (0.10, 0.020),
    "strict, K 1": (0.09, 0.019),
    "strict, K 4": (0.08, 0.030),
    "MARS, K 1": (0.08, 0.021),
    "MARS, K 4": (0.06, 0.025),
}
FOUND = {
    (name, point): paces[number]
    for name, paces in PACES.items()
    for number, point in enumerate((ONE, MANY))
}
EVERY = [(family, k) for family in ("strict", "MARS") for k in (1, 4)]


def test_seconds_per_token():
    cell = Cell("strict, K 1", NGRAM, 1.0, 1)
    records = [turn(cell, token_seconds=0.1), turn(cell, 1, token_seconds=0.2)]
    (pace,) = tune.paces(records).values()
    # 0.1 s and 20 tokens more, at 1 and 1.1 times, then 1.2 and 1.3 times, the seconds.
    assert pace == pytest.approx((4 * 0.1 + 20 * (0.21 + 0.5)) / (4 * 21))


def test_the_slower_half_goes_and_what_failed():
    assert tune.faster_half(EVERY, ONE, FOUND) == [("MARS", 4), ("strict", 4)]
    assert tune.faster_half(EVERY, MANY, FOUND) == [("strict", 1), ("MARS", 1)]
    known = {key: pace for key, pace in FOUND.items() if "MARS" not in key[0]}
    assert tune.faster_half(EVERY, ONE, known) == [("strict", 4), ("strict", 1)]


def test_put_together():
    left = dict.fromkeys((ONE, MANY), EVERY)
    assert tune.put_together(left, FOUND, ["strict", "MARS"]) == ("MARS", {1: 4, 16: 0})
    assert tune.put_together(left, FOUND, ["strict"]) == ("strict", {1: 4, 16: 1})
    nothing = {point: [] for point in left}
    assert tune.put_together(nothing, FOUND, ["strict"]) == ("strict", {1: 0, 16: 0})


def test_k_by_load():
    k, schedule = "num_speculative_tokens", "num_speculative_tokens_per_batch_size"
    assert tune.by_load({"method": "m"}, {1: 0, 4: 0}) is None
    assert tune.by_load({"method": "m"}, {1: 3, 4: 3}) == {"method": "m", k: 3}
    found = tune.by_load({"method": "m"}, {1: 5, 4: 3, 16: 0, 64: 0})
    assert found[k] == 5
    assert found[schedule] == [[1, 2, 5], [3, 8, 3], [9, 32, 0], [33, 64, 0]]


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_tiny_model(tiny_model, tmp_path, capfd):
    prompts = tmp_path / "prompts.jsonl"
    texts = [f"w{n} w{n + 1} w{n + 2} w{n} w{n + 1}" for n in range(20, 32)]
    prompts.write_text("".join(json.dumps({"id": t, "prompt": t}) + "\n" for t in texts))
    output = tmp_path / "tune.jsonl"
    arguments = [
        *("tune", "--model", str(tiny_model), "--prompts", str(prompts), "--output", str(output)),
        *("--temperature", "0", "--concurrency", "1", "4", "--num-speculative-tokens", "2", "4"),
        *("--minutes", "0.3", "--max-tokens", "16", "--block", "3"),
        "--server-arg=--max-model-len=256",
    ]
    assert cli.main(arguments) == 0
    out, err = capfd.readouterr()
    assert "left" in err
    told = json.loads(output.with_suffix(".json").read_text())
    config = told["speculative_config"]
    if config is None:
        assert "Serve without drafts." in out
    else:
        assert json.loads(re.search(r"--speculative-config '(.*)'", out)[1]) == config
        assert all("x no drafts" in sentence for sentence in told["gains"])
    # The comparison is on prompts that the choice has not seen.
    records = read_sweep(output).records
    chosen_on = {it.block for it in records if ", K " in it.name}
    assert {it.block for it in records if it.name == "tuned"}.isdisjoint(chosen_on)
    # Another call has nothing to measure.
    assert cli.main(arguments) == 0
    assert read_sweep(output).records == records
    assert json.loads(output.with_suffix(".json").read_text())["speculative_config"] == config
    # What another draft did says nothing of this one.
    assert cli.main([*arguments, "--draft", "suffix"]) != 0
