"""`vllm-mars tune`: candidates, the choice, its report, and a real run on a tiny model."""

import dataclasses
import json
import re

import pytest

from sweep_files import NGRAM, failed, turn, write_prompts, write_sweep
from vllm_mars.cli import __main__ as cli
from vllm_mars.lab import tune
from vllm_mars.lab.plan import Cell
from vllm_mars.lab.records import read_sweep
from vllm_mars.models.draft_head import PACKAGED_HEAD

ONE, MANY = (1.0, 1), (1.0, 16)
# Seconds per token of each candidate at one request and at 16.
PACES = {
    "no drafts": (0.10, 0.020),
    "strict, K 1": (0.09, 0.019),
    "strict, K 4": (0.08, 0.030),
    "MARS, K 1": (0.08, 0.021),
    "MARS, K 4": (0.06, 0.025),
}
SECONDS = {
    (name, point): paces[number]
    for name, paces in PACES.items()
    for number, point in enumerate((ONE, MANY))
}
EVERY = [(family, k) for family in ("strict", "MARS") for k in (1, 4)]


def test_seconds_per_token():
    cell = Cell("strict, K 1", NGRAM, 1.0, 1)
    records = [turn(cell, token_seconds=0.1), turn(cell, 1, token_seconds=0.2)]
    (pace,) = tune.paces(records).values()
    # The middle half of 0.1 + 20 x (0.1, 0.11, 0.24, 0.26).
    assert pace == pytest.approx((2 * 0.1 + 20 * (0.11 + 0.24)) / 2 / 21)


def test_the_slower_half_and_failures_are_dropped():
    assert tune.faster_half(EVERY, ONE, SECONDS) == [("MARS", 4), ("strict", 4)]
    assert tune.faster_half(EVERY, MANY, SECONDS) == [("strict", 1), ("MARS", 1)]
    known = {key: pace for key, pace in SECONDS.items() if "MARS" not in key[0]}
    assert tune.faster_half(EVERY, ONE, known) == [("strict", 4), ("strict", 1)]


def test_lengths_by_load():
    left = dict.fromkeys((ONE, MANY), EVERY)
    assert tune.put_together(left, SECONDS, ["strict", "MARS"]) == ("MARS", {1: 4, 16: 0})
    assert tune.put_together(left, SECONDS, ["strict"]) == ("strict", {1: 4, 16: 1})
    nothing = {point: [] for point in left}
    assert tune.put_together(nothing, SECONDS, ["strict"]) == ("strict", {1: 0, 16: 0})


@pytest.mark.parametrize(
    ("draft", "samples", "on_cpu", "adapts"),
    [
        (str(PACKAGED_HEAD), True, False, ["strict, probabilistic", "MARS"]),
        (str(PACKAGED_HEAD), False, False, ["strict", "MARS"]),
        (str(PACKAGED_HEAD), True, True, []),
        ("ngram", True, False, []),
    ],
)
def test_adaptive_verification_is_tried_if_it_can_run(draft, samples, on_cpu, adapts):
    families = tune.families_of(draft, 0.02, is_sampled=samples, on_cpu=on_cpu)
    adaptive = {n for n, config in families.items() if "enable_adaptive_verification" in config}
    assert adaptive == {f"{name}, adaptive" for name in adapts}
    # Best strict verification is not adaptive MARS.
    left = {ONE: [(name, 1) for name in families]}
    fastest = "MARS, adaptive" if adaptive else "MARS"
    seconds = {(f"{name}, K 1", ONE): 0.05 for name in families}
    seconds |= {("no drafts", ONE): 0.1, (f"{fastest}, K 1", ONE): 0.04}
    served = tune.settings(left, seconds, families)
    assert served[tune.TUNED, 1.0][0] == fastest
    assert not served[tune.BEST_STRICT, 1.0][0].startswith("MARS")


def test_k_by_load():
    k, schedule = "num_speculative_tokens", "num_speculative_tokens_per_batch_size"
    assert tune.by_load({"method": "m"}, {1: 0, 4: 0}) is None
    assert tune.by_load({"method": "m"}, {1: 3, 4: 3}) == {"method": "m", k: 3}
    config = tune.by_load({"method": "m"}, {1: 5, 4: 3, 16: 0, 64: 0})
    assert config[k] == 5
    assert config[schedule] == [[1, 2, 5], [3, 8, 3], [9, 32, 0], [33, 64, 0]]


GREEDY = 0.0
FAMILIES = {"strict": {"method": "s"}, "MARS": {"method": "m"}}


def chosen():
    """Settings for which MARS is best for greedy requests and strict verification for sampled."""
    measured = dict(SECONDS)
    for name, seconds in (("no drafts", 0.1), ("strict, K 1", 0.05), ("MARS, K 1", 0.06)):
        measured[name, (GREEDY, 1)] = measured[name, ONE]
        measured[name, ONE] = seconds
    left = {point: [("strict", 1), ("MARS", 1)] for point in (ONE, (GREEDY, 1))}
    return tune.settings(left, measured, FAMILIES)


def test_greedy_and_sampled_requests_have_separate_choices():
    served = chosen()
    k = {"num_speculative_tokens": 1}
    assert served[tune.TUNED, GREEDY] == ("MARS", {"method": "m", **k})
    assert served[tune.TUNED, 1.0] == ("strict", {"method": "s", **k})
    # Sums of log speedups: 0.69 + 0.11 against 0.51 + 0.22.
    assert served[tune.FOR_ALL, GREEDY] == served[tune.FOR_ALL, 1.0] == served[tune.TUNED, 1.0]


def test_no_setting_is_compared_with_itself():
    rules = (rule.split("=", 1) for rule in tune.rules(chosen()))
    names = [(name, (json.loads(config) or {}).get("temperature")) for name, config in rules]
    # The choice for all and the choice at temperature 1 are the best strict verification.
    assert names == [
        ("no drafts", None),
        (tune.BEST_STRICT, GREEDY),
        (tune.TUNED, GREEDY),
        (tune.BEST_STRICT, 1.0),
    ]


def test_report(tmp_path):
    def measured(name, temperature, token_seconds, shift=0.0):
        cell = Cell(name, NGRAM, temperature, 1)
        for block in range(4):
            noise = 1 + shift * (-1) ** block
            yield turn(cell, block, token_seconds=token_seconds * noise)

    records = [
        *measured("no drafts", GREEDY, 0.04),
        *measured(tune.BEST_STRICT, GREEDY, 0.02),
        *measured(tune.TUNED, GREEDY, 0.02, shift=0.3),
        *measured("no drafts", 1.0, 0.04),
        *measured(tune.BEST_STRICT, 1.0, 0.02),
    ]
    served = chosen()
    file = read_sweep(write_sweep(tmp_path / "t.jsonl", records))
    lines, table = tune.summarize(served, file)
    assert lines[0].startswith("greedy: MARS, --speculative-config '{")
    assert lines[1].startswith("temperature 1: strict, --speculative-config '{")
    assert lines[2] == "That is strict verification at its best, so it was measured once."
    assert lines[3].startswith("A server has one setting; over all of these requests: strict, --")
    assert "For ±5% the comparison, half of --minutes, takes" in lines[4]
    (row,) = (row for row in table.rows if row[2] == tune.TUNED)
    assert row[3].endswith(")") and row[4].endswith(", no difference shown")
    assert row[-1] == "21.0"
    block = [record for record in file.records if record.block == 0]
    lines, _ = tune.summarize(served, dataclasses.replace(file, records=block[:1]))
    assert lines[-1].startswith("A server has one setting")
    for left in ([], [failed(record.cell, "why") for record in block]):
        _, table = tune.summarize(served, dataclasses.replace(file, records=left))
        assert all(row[3:5] == ["", ""] for row in table.rows)


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_tiny_model(tiny_model, tmp_path, capfd):
    texts = [f"w{n} w{n + 1} w{n + 2} w{n} w{n + 1}" for n in range(20, 36)]
    prompts = write_prompts(tmp_path / "p.jsonl", [{"id": t, "prompt": t} for t in texts])
    output = tmp_path / "tune.jsonl"
    arguments = [
        "tune",
        f"--model={tiny_model}",
        f"--prompts={prompts}",
        f"--output={output}",
        "--temperature=0",
        *("--concurrency", "1", "4"),
        *("--num-speculative-tokens", "2", "4"),
        "--minutes=0.3",
        "--max-tokens=16",
        "--server-arg=--max-model-len=256",
    ]
    assert cli.main(arguments) == 0
    out, err = capfd.readouterr()
    assert "left" in err
    report = json.loads(output.with_suffix(".json").read_text())
    assert report["told"] == out.splitlines()[-len(report["told"]) :]
    (tuned,) = (choice for choice in report["chosen"] if choice["rule"] == tune.TUNED)
    if config := tuned["speculative_config"]:
        assert json.loads(re.search(r"--speculative-config '(.*)'", out)[1]) == config
    # The comparison uses other prompts than the choice.
    records = read_sweep(output).records
    chosen_on = {record.block for record in records if ", K " in record.name}
    assert {record.block for record in records if record.name == "tuned"}.isdisjoint(chosen_on)
    # Another call measures nothing.
    assert cli.main(arguments) == 0
    assert read_sweep(output).records == records
    assert json.loads(output.with_suffix(".json").read_text())["chosen"] == report["chosen"]
    # Figures of another draft cannot be used.
    assert cli.main([*arguments, "--draft", "suffix"]) != 0
