"""The report: what it tells from records, and what it says of missing data."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from report_files import PROMPTS, RULES, make_cell, write_sweep
from vllm_mars.cli import main
from vllm_mars.experiments.report.advice import BUDGET, CANNOT_TELL, conclusion
from vllm_mars.experiments.report.answers import pieces, relaxed_answers
from vllm_mars.experiments.report.chart import Chart, Curve, Point
from vllm_mars.experiments.report.page import read_sections, write_report
from vllm_mars.experiments.sweep.record_file import append_cell, append_quality
from vllm_mars.experiments.sweep.records import Estimate, OffChoice, PromptQuality, Quality


def test_a_section_for_each_draft(tmp_path):
    """Each has every point of the grid, its own strict rows and the shared autoregressive ones."""
    sections = read_sections([write_sweep(tmp_path / "s.jsonl")])
    assert [section.setup for section in sections] == [("tiny", "ngram", 4), ("tiny", "ngram", 8)]
    four, eight = sections
    assert [len(point) for point in four.points] == [4, 4]
    assert [it.row.key.concurrency for it in four.points[1]] == [4] * 4
    assert len(eight.points[0]) == 3
    rules = {it.row.key.rule: it for it in four.points[0]}
    mars = rules["mars 0.9"]
    assert mars.strict.key == rules["standard"].row.key
    assert mars.tokens_per_second.value == pytest.approx(45.2, abs=0.05)
    assert mars.row.speedup == pytest.approx(2.25)
    assert mars.speedup == pytest.approx((1.25,) * 3), "all prompts are alike"
    assert mars.sooner == pytest.approx((1.25,) * 3)
    assert mars.seconds.value == pytest.approx(400 / 45 / 4 * (1 + 1 / 1.01) / 2)
    assert mars.length == pytest.approx((100,) * 3)
    assert mars.ttft == pytest.approx((0.1,) * 3)
    tpot = (400 / 45 / 4 * (1 + 1 / 1.01) / 2 - 0.1) / 99
    assert mars.tpot == pytest.approx((tpot,) * 3)
    assert mars.faster == pytest.approx((rules["standard"].tpot.value / tpot,) * 3)
    assert mars.loss == pytest.approx(((math.log(0.5 / 0.25) + math.log(0.4 / 0.3)) / 100,) * 3)
    assert rules["standard"].speedup == pytest.approx((1,) * 3)
    assert rules["autoregressive"].speedup.value == pytest.approx(20 / 36)
    assert [curve.name for curve in four.chart.curves] == ["theta"]
    # From strict decoding to the loosest.
    assert [label for _, _, label in four.chart.curves[0].points] == ["", "0.98", "0.9"]
    assert four.chart.curves[0].points[0].x == [0]
    assert len(four.relaxed) == len(PROMPTS)
    (title, first), *_ = four.relaxed.items()
    assert title == "mars 0.9: a (2 relaxed)"
    assert sum(token is not None for _, token in first) == 2


def test_intervals_are_paired_over_prompts(tmp_path):
    """A rule that speeds up some prompts alone has a wide interval, whatever their lengths."""
    cells = [make_cell("standard", None, 4, 40.0, 1, 0), make_cell("mars", 0.9, 4, 40.0, 1, 0)]
    lengths = (1.0, 2.0, 3.0, 4.0)
    for cell, factors in zip(cells, ((1, 1, 1, 1), (1, 1, 0.5, 0.5)), strict=True):
        outputs = [
            dataclasses.replace(output, seconds=length * factor, output_tokens=int(100 * length))
            for output, length, factor in zip(cell.outputs, lengths, factors, strict=True)
        ]
        seconds = sum(output.seconds for output in outputs)
        speed = dataclasses.replace(cell.speed, seconds=seconds, output_tokens=1000)
        append_cell(
            tmp_path / "s.jsonl", dataclasses.replace(cell, outputs=tuple(outputs), speed=speed)
        )
    strict, mars = read_sections([tmp_path / "s.jsonl"])[0].points[0]
    assert strict.speedup == (1, 1, 1), "beside itself it has no spread"
    assert strict.seconds.low < strict.seconds.value < strict.seconds.high
    assert mars.speedup.value == pytest.approx(10 / 6.5)
    assert mars.speedup.low == pytest.approx(1)
    assert mars.speedup.high == pytest.approx(2)
    assert 1 < mars.faster.value < 2, "between two prompts alike and two twice as fast"
    assert mars.faster.low == 1


def write_files_of_prompts(path, names, rules=RULES[:3]):
    """A sweep over several files, each with prompts `names[file]`."""
    for file, prompts in names.items():
        for method, theta, k, speed, nll in rules:
            cell = make_cell(method, theta, k, speed, 1, 0)
            outputs = tuple(
                dataclasses.replace(output, prompt_id=name)
                for output, name in zip(cell.outputs, prompts, strict=True)
            )
            key = dataclasses.replace(cell.key, dataset=file)
            cell = dataclasses.replace(cell, key=key, outputs=outputs)
            append_cell(path, cell)
            answers = tuple(PromptQuality(name, {"nll": nll}) for name in prompts)
            append_quality(path, key, Quality(answers, ()))
    return path


def test_the_files_of_a_sweep_are_taken_together(tmp_path):
    """The answer is of all prompts; each file's own rows are folded."""
    names = {"one": "abcd", "two": "efgh", "three": "ijkl"}
    path = write_files_of_prompts(tmp_path / "s.jsonl", names)
    (section,) = read_sections([path])
    assert [point[0].row.key.prompts for point in section.points] == ["all", *names]
    (mars,) = (it for it in section.points[0] if it.row.key.lossy)
    assert mars.row.estimate("nll").samples == 12
    assert section.answer.measured is mars
    write_report([path], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.index("Prompts: all (12);") < page.index("<details") < page.index("one (4);")


@pytest.mark.parametrize("rules", [RULES[:3], RULES[1:3]], ids=["beside", "without"])
def test_autoregressive_decoding_has_columns_where_it_was_measured(tmp_path, rules):
    sweep = write_sweep(tmp_path / "s.jsonl", rules, (1,))
    write_report([sweep], tmp_path / "page.html")
    head, *lines = re.findall("<tr.*?</tr>", (tmp_path / "page.html").read_text(), re.DOTALL)[:3]
    columns = ("x autoregr.", "NLL change")
    assert [name in head for name in columns] == [rules == RULES[:3]] * 2
    assert len({len(re.findall("<t[hd]", line)) for line in (head, *lines)}) == 1


@pytest.mark.parametrize(
    ("names", "rules"),
    [
        ({"one": "abcd"}, {}),
        ({"one": "abcd", "two": "defg"}, {}),
        ({"one": "abcd", "two": "efgh"}, {"two": RULES[:2]}),
    ],
    ids=["one file", "a prompt of the same name", "other rules"],
)
def test_files_that_cannot_be_taken_together(tmp_path, names, rules):
    for file, prompts in names.items():
        write_files_of_prompts(tmp_path / "s.jsonl", {file: prompts}, rules.get(file, RULES[:3]))
    (section,) = read_sections([tmp_path / "s.jsonl"])
    assert sorted(point[0].row.key.prompts for point in section.points) == sorted(names)


def advice(tmp_path, rules, **more):
    write_sweep(tmp_path / "s.jsonl", rules, (1,), **more)
    (section,) = read_sections([tmp_path / "s.jsonl"])
    answer = section.answer
    return answer


def test_the_fastest_rule_within_the_budget(tmp_path):
    """A faster one loses too much, a slower one is as good."""
    rules = [*RULES[:3], ("mars", 0.98, 4, 40.0, 0.50), ("mars", 1.0, 4, 38.0, 0.50)]
    answer = advice(tmp_path, rules, small_loss=0.98)
    assert json.loads(answer.setting) == {"rejection_sample_method": "mars", "mars_theta": 0.98}
    assert answer.measured.loss.high < BUDGET
    assert answer.measured.speedup.value == pytest.approx(40 / 36)
    assert f"at most {BUDGET} nats per token" in answer.why


def test_a_rule_that_makes_answers_longer_is_not_faster(tmp_path):
    """It has more tokens per second, but is done later."""
    path = tmp_path / "s.jsonl"
    for cell in (make_cell("standard", None, 4, 40.0, 1, 0), make_cell("mars", 0.9, 4, 50.0, 1, 0)):
        if cell.key.lossy:
            longer = [
                dataclasses.replace(one, output_tokens=150, seconds=1.5 * one.seconds)
                for one in cell.outputs
            ]
            speed = dataclasses.replace(
                cell.speed, output_tokens=600, seconds=1.5 * cell.speed.seconds
            )
            cell = dataclasses.replace(cell, outputs=tuple(longer), speed=speed)
        append_cell(path, cell)
        answers = tuple(PromptQuality(name, {"nll": 0.5}) for name in PROMPTS)
        append_quality(path, cell.key, Quality(answers, ()))
    (section,) = read_sections([path])
    mars = next(it for it in section.points[0] if it.row.key.lossy)
    assert mars.speedup.low > 1 > mars.sooner.high
    assert section.answer.setting == CANNOT_TELL


def test_an_answer_that_ends_at_once_loses_nothing(tmp_path):
    path = tmp_path / "s.jsonl"
    for cell in (make_cell("standard", None, 4, 40.0, 1, 0), make_cell("mars", 0.9, 4, 50.0, 1, 0)):
        first, *others = cell.outputs
        outputs = (dataclasses.replace(first, text="", output_tokens=1), *others)
        append_cell(path, dataclasses.replace(cell, outputs=outputs))
        loss = (OffChoice(1, 4, 7, "red", -1.5, "brown", -1.0),) if cell.key.lossy else ()
        answers = [PromptQuality(name, {"nll": 0.5}, loss) for name in PROMPTS[1:]]
        append_quality(path, cell.key, Quality((PromptQuality(PROMPTS[0], {}), *answers), ()))
    strict, mars = read_sections([path])[0].points[0]
    assert strict.loss.value == 0
    assert mars.loss.value == pytest.approx(3 * 0.5 / 301)


def test_the_answers_shown_are_those_that_were_judged(tmp_path):
    """Of a prompt that was asked twice, the first."""
    cell = make_cell("mars", 0.9, 4, 50.0, 4, 0)
    again = dataclasses.replace(cell.outputs[0], text="short")
    cell = dataclasses.replace(cell, outputs=(*cell.outputs, again))
    token = OffChoice(1, 4, 7, "red", -1.5, "brown", -1.0)
    quality = Quality((PromptQuality(PROMPTS[0], {"nll": 0.5}, (token,)),), ())
    (found,) = relaxed_answers([dataclasses.replace(cell, quality=quality)]).values()
    assert found[1] == ("red", token)


def test_conclusions_are_of_the_sweeps_margins(tmp_path):
    path = tmp_path / "s.jsonl"
    for cell in (
        make_cell("autoregressive", None, 0, 40.0, 1, 0),
        make_cell("mars", 0.9, 4, 50.0, 1, 0),
    ):
        append_cell(path, cell)
        scores = [{"nll": 0.5 + 0.02 * cell.key.lossy}] * len(PROMPTS)
        found = (Estimate("nll", 4, 0.5, 0.5, 0.5, margin=0.01),) if cell.key.lossy else ()
        answers = (PromptQuality(*one) for one in zip(PROMPTS, scores, strict=True))
        append_quality(path, cell.key, Quality(tuple(answers), found))
    mars = read_sections([path])[0].points[0][-1]
    assert mars.row.estimate("nll").margin == 0.01
    assert not mars.row.estimate("nll").non_inferior


def test_prices_are_a_curve_beside_the_others(tmp_path):
    """A curve each for the prices alone and with further options, from strict to the loosest."""
    path = write_sweep(tmp_path / "s.jsonl", RULES[:4], (1,))
    limit = '{"mars_max_relaxed_share": 0.1}'
    for price, options, speed in ((0.5, "", 50.0), (0.25, "", 44.0), (0.5, limit, 48.0)):
        cell = make_cell("mars", 0.9, 4, speed, 1, 0)
        key = {"metric": "price", "theta": None, "price": price, "options": options}
        cell = dataclasses.replace(cell, key=dataclasses.replace(cell.key, **key))
        append_cell(path, cell)
        loss = (OffChoice(1, 4, 7, "red", -1.0 - price / 10, "brown", -1.0),)
        append_quality(
            path,
            cell.key,
            Quality(tuple(PromptQuality(name, {"nll": 0.5}, loss) for name in PROMPTS), ()),
        )
    (section,) = read_sections([path])
    curves = {curve.name: [text for *_, text in curve.points] for curve in section.chart.curves}
    assert curves == {
        **{"theta": ["", "0.98", "0.9"], "price": ["", "0.25", "0.5"]},
        "price max_relaxed_share 0.1": ["", "0.5"],
    }
    x = [point.x[0] for point in section.chart.curves[1].points]
    assert x == pytest.approx([0, 0.00025, 0.0005])
    assert json.loads(section.answer.setting) == {
        **{"rejection_sample_method": "mars", "mars_metric": "price", "mars_price": 0.5}
    }


@pytest.mark.parametrize(
    ("speed", "nll"), [(36.0, 0.50), (40.0, 0.51)], ids=["not faster", "NLL is worse"]
)
def test_a_rule_that_is_not_shown_to_be_good(tmp_path, speed, nll):
    answer = advice(tmp_path, [*RULES[:2], ("mars", 0.98, 4, speed, nll)], small_loss=0.98)
    assert answer.setting == CANNOT_TELL
    assert answer.measured.row.key.rule == "mars 0.98", "the least lossy one"


@pytest.mark.parametrize(
    ("rules", "judged", "missing"),
    [
        (RULES[:2], True, "No lossy rule was timed beside a strict one; `vllm-mars sweep`"),
        ([RULES[0], RULES[2]], True, "`vllm-mars sweep --method standard mars` measures both"),
        (RULES[2:3], True, "No lossy rule was timed beside a strict one"),
        (RULES[:3], False, "`vllm-mars sweep --temperature 0` judges answers to prompts"),
        (RULES[:3], True, "The least lossy one, mars 0.9"),
    ],
)
def test_missing_data_is_named(tmp_path, rules, judged, missing):
    answer = advice(tmp_path, rules, judged=judged)
    assert answer.setting == CANNOT_TELL
    assert missing in answer.why
    write_report([tmp_path / "s.jsonl"], tmp_path / "page.html")
    assert CANNOT_TELL in (tmp_path / "page.html").read_text()


def test_verdicts():
    base = Estimate("pass_at_1", 100, 0.5, 0.4, 0.6, 0.5, 0.0, -0.1, 0.1, non_inferior=False)
    assert conclusion(base) == "not shown"
    assert conclusion(dataclasses.replace(base, non_inferior=True)) == "kept"
    worse = dataclasses.replace(base, difference_high=-0.01)
    assert conclusion(worse) == "worse"
    # Strict decoding solves 29 of 100.
    assert conclusion(dataclasses.replace(worse, reference=0.29)) == CANNOT_TELL
    nll = dataclasses.replace(base, name="nll", margin=0.1, difference_low=-0.09)
    assert conclusion(nll) == "not shown"
    for task in (base, nll):
        within = {"margin": 0.1, "difference_low": -0.09, "difference_high": 0.09}
        assert conclusion(dataclasses.replace(task, **within)) == "equal"
        assert conclusion(dataclasses.replace(task, **within | {"margin": 0.09})) == "not shown"
    assert conclusion(dataclasses.replace(nll, difference_low=0.01)) == "worse"
    assert conclusion(dataclasses.replace(worse, margin=0.2)) == "worse"
    assert conclusion(dataclasses.replace(base, name="chrf")) == ""


def test_two_sweeps_with_the_same_autoregressive_cell(tmp_path):
    """Sweeps of two drafts share a page, each with speeds of its own file."""
    one = write_sweep(tmp_path / "one.jsonl", RULES[:3], (1,))
    other = tmp_path / "other.jsonl"
    write_sweep(other, [("autoregressive", None, 0, 10.0, 0.5), *RULES[4:]], (1,))
    page = tmp_path / "page.html"
    assert main(["report", str(one), str(other), str(one), "--output", str(page)]) == 0
    four, eight = read_sections([one, other, one])
    assert [four.setup[2], eight.setup[2]] == [4, 8]
    assert four.points[0][0].tokens_per_second.value == pytest.approx(20.1, abs=0.01)
    assert eight.points[0][0].tokens_per_second.value == pytest.approx(10.05, abs=0.01)
    assert "From one.jsonl." in page.read_text()
    assert "From other.jsonl." in page.read_text()


def test_pieces():
    text = "abcdef"
    tokens = [OffChoice(1, 2, 4, "cd", 0.0, "X", 0.0), OffChoice(2, 3, 4, "d", 0.0, "Y", 0.0)]
    assert pieces(text, tokens) == [("ab", None), ("cd", tokens[0]), ("ef", None)]
    assert pieces(text, []) == [("abcdef", None)]
    whole = OffChoice(0, 0, 2, "ab", 0.0, "X", 0.0)
    assert pieces("ab", [whole]) == [("ab", whole)]


def test_a_chart():
    """Values, and intervals where there are any; families differ in color or in the line."""
    strict = Point([0.0], [1.0])
    curves = [
        Curve("price", "price", "", [strict, Point([0.1], (1.2, 1.1, 1.3), "0.5")]),
        Curve("price guarded", "price", " guarded", [strict, Point([0.1], [1.1], "0.6")]),
        Curve("fly", None, "", [strict, Point((0.3, 0.2, 0.4), [1.4], "fly")]),
    ]
    axes = Figure().subplots()
    Chart("loss <nats>", "speed", curves, 1.0).draw(axes)
    lines = axes.get_lines()[:-1]
    assert [line.get_label() for line in lines] == ["price", "price guarded", "fly"]
    assert [list(line.get_xdata()) for line in lines] == [[0, 0.1], [0, 0.1], [0, 0.3]]
    assert len({line.get_color() for line in lines}) == 2
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-"]
    upright, flat = (bars.get_segments()[0].tolist() for bars in axes.collections)
    assert upright == [[0.1, 1.1], [0.1, 1.3]]
    assert flat == [[0.2, 1.4], [0.4, 1.4]]
    assert list(axes.get_lines()[-1].get_ydata()) == [1, 1], "strict decoding"
    drawn = Chart("loss <nats>", "speed", curves, 1.0).svg()
    assert drawn == Chart("loss <nats>", "speed", curves, 1.0).svg(), "the same each time"
    assert "loss &lt;nats&gt;" in drawn
    assert drawn.startswith("<svg")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.jsonl", "{}\n", "is neither a cell nor its quality"),
        ("none.jsonl", None, "cannot be read"),
    ],
)
def test_bad_files(tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / name), "--output", str(page)]) == 1
    assert message in capsys.readouterr().err
    assert not page.exists()


def test_an_output_that_cannot_be_written(tmp_path):
    sweep = write_sweep(tmp_path / "s.jsonl")
    with pytest.raises(RuntimeError, match="output=/proc/none/page.html cannot be written"):
        write_report([sweep], Path("/proc/none/page.html"))
