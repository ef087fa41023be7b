"""The tables of the docs against the files of figures, and what these say of their runs."""

import gzip
import json
import math
import re
import statistics

import pytest

from benchmarks import figures, reference

TABLE = {
    "schema": figures.SCHEMA,
    "columns": [["rule", "", "gain text"], ["not shown", None], ["speed", ".2f", "gain"]],
    "rows": [["greedy"], ["price 0.3", 7, [1.136, 1.09, 1.2]], ["strict", 8, None]],
    "runs": [
        {
            "git_commit": "a" * 40,
            "hardware": {"cpu": "AMD EPYC, family 25, model 1, stepping 1", "gpu": None},
        }
    ],
}
# All but a picture's.
NAMES = [name for name in figures.index() if name != "step"]


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_the_page_shows_what_the_files_say(page):
    text = page.read_text()
    assert figures.written(text, page.parent) == text, "`make figures` writes what the files say"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_figures_says_where_it_comes_from(name):
    found = figures.read(name)
    runs = found["runs"]
    assert runs and found["rows"] and all(run["raw"] for run in runs)
    if any(run["raw"] != "this file" for run in runs) and not all(
        (figures.RESULTS / run["raw"]).is_file() for run in runs
    ):
        assert re.fullmatch(r"[0-9a-f]{40}", found["raw_files_at"])
    for run in runs:
        assert run["command"]
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", run["git_commit"])
        assert {"vllm_mars", "vllm", "torch", "python"} <= run["versions"].keys()
        assert {"cpu", "cores", "memory_gib", "gpu"} <= run["hardware"].keys()


def raw_answers(found, of, temperature, rule, *, ended=False):
    """What a row was taken from: the means of each prompt's answers, and what was counted."""
    means, nats, answers, tokens = {}, 0.0, 0, 0
    for name in dict.fromkeys(run["raw"] for run in found["runs"]):
        with gzip.open(figures.RESULTS / name, "rt") as file:
            calls = [json.loads(line) for line in file]
        for call in calls:
            if (call.get("name"), call.get("temperature")) != (rule, temperature):
                continue
            if not call["prompts"][0].startswith(f"{of}/"):
                continue
            number = len(call["seeds"])
            nats += call["lost"]
            tokens += sum(call["answers"]["tokens"])
            answers += len(call["answers"]["tokens"])
            for at, prompt in enumerate(call["prompts"]):
                each = range(at * number, (at + 1) * number)
                each = [it for it in each if call["answers"]["ended"][it] or not ended]
                if not each:
                    continue
                own = means[prompt] = {
                    key: statistics.fmean(values[it] for it in each)
                    for key, values in call["answers"].items()
                }
                own |= {"further": own["tokens"] - 1, "points": 100 * own["ended"]}
    return means, nats / tokens, answers


def ratio(means, prompts, above, below):
    return sum(means[it][above] for it in prompts) / sum(means[it][below] for it in prompts)


def steps_of(prompts, own, strict):
    return ratio(own, prompts, "further", "steps") / ratio(strict, prompts, "further", "steps")


def agrees(cell, statistic, prompts):
    """A value to its last digit, and its bootstrap's interval with that of a jackknife."""
    value, low, high = cell if isinstance(cell, list) else [cell] * 3
    assert value == pytest.approx(statistic(prompts), rel=1e-4, abs=2e-5)
    without = [statistic([it for it in prompts if it != left]) for left in prompts]
    half = 1.96 * math.sqrt((len(prompts) - 1) * statistics.pvariance(without))
    assert (high - low) / 2 == pytest.approx(half, rel=0.15, abs=1e-4)


@pytest.mark.parametrize("name", ["reading", "reading8", "exact", "ends"])
def test_the_raw_answers_give_the_figures(name):
    """By other code."""
    found, temperature, checked = figures.read(name), 0.0, 0
    titles = [title for title, *_ in found["columns"]]
    for row in found["rows"]:
        if len(row) == 1:
            temperature = 0.0 if row[0] == "greedy" else float(row[0].split()[-1])
            continue
        told = dict(zip(titles, row, strict=True))
        of = name.rstrip("8"), temperature
        own, nats, answers = raw_answers(found, *of, told["rule"])
        strict, *_ = raw_answers(found, *of, "strict")
        assert (told["prompts"], told["answers"]) == (len(own), answers)

        def steps(prompts, own=own):
            return ratio(own, prompts, "further", "steps")

        def gain(prompts, own=own, strict=strict, steps=steps):
            return steps(prompts) / steps(prompts, strict)

        def lost(prompts, own=own):
            return ratio(own, prompts, "drift", "tokens")

        def ended(prompts, own=own, strict=strict):
            return statistics.fmean(own[it]["points"] - strict[it]["points"] for it in prompts)

        agrees(told["tokens per step"], steps, list(own))
        if temperature:
            # Of a distribution, which the answers' tokens alone do not tell.
            assert told["nats lost per token"] == pytest.approx(nats, abs=1e-5)
        else:
            agrees(told["nats lost per token"], lost, list(own))
        if told["rule"] != "strict":
            both = [it for it in own if it in strict]
            agrees(told["tokens per step x strict"], gain, both)
            agrees(told["ended less strict's, points"], ended, both)
            own, *_ = raw_answers(found, *of, told["rule"], ended=True)
            strict, *_ = raw_answers(found, *of, "strict", ended=True)
            both = [it for it in own if it in strict]
            agrees(
                told["where answers ended"],
                lambda of, ends=(own, strict): steps_of(of, *ends),
                both,
            )
            checked += 1
    assert checked


def test_seconds_on_a_gpu_are_of_the_raw_rounds():
    found = figures.read("engines")
    with gzip.open(figures.RESULTS / "text/engines.jsonl.gz", "rt") as file:
        rounds = [json.loads(line) for line in file][1:]
    for at_a_time, row in zip((1, 32), found["rows"], strict=True):
        for name, cell in zip(("none", "standard-k4", "mars-k4"), row[1:], strict=True):
            own = [
                it
                for it in rounds
                if (it["name"], it["temperature"], it["batch"]) == (name, 0, at_a_time)
            ]
            each = [it["tokens"] / it["seconds"] for it in own]
            mean = sum(it["tokens"] for it in own) / sum(it["seconds"] for it in own)
            assert len(own) == 3 and cell == [round(it) for it in (mean, min(each), max(each))]


def test_rows_of_one_question_are_pooled():
    # Standard errors of 1 and 2, so weights of 1 and 1/4.
    one, two = [3.0, 3 - 1.96, 3 + 1.96], [-2.0, -2 - 3.92, -2 + 3.92]
    half = 1.96 / math.sqrt(1.25)
    assert figures.pooled([one, two]) == pytest.approx([2, 2 - half, 2 + half])
    assert figures.pooled([one]) == pytest.approx(one) and figures.pooled([]) is None


def test_what_bounds_do_to_text(monkeypatch):
    """Greedily the first of two files counts; power: 2.8 standard errors, of 1, of 2, of both."""
    title = "ended less strict's, points"
    files = {
        "a": [("greedy", figures.BOUND, {title: [3.0, 1.04, 4.96]})],
        "b": [
            ("greedy", figures.BOUND, {title: [9.0, 8.0, 10.0]}),
            ("greedy", "mars_max_loss 0.05", {title: [-1.0, -2.0, 0.0]}),
            ("warm", figures.BOUND, {title: [-2.0, -5.92, 1.92]}),
        ],
    }
    pooled = {"greedy": [[("a", "greedy"), ("b", "greedy")]], "warm": [[("b", "warm")]]}
    monkeypatch.setattr(
        figures, "EFFECTS", {"ended": (title, "+.1f", ("greedy", "warm", figures.ALL))}
    )
    monkeypatch.setattr(figures, "POOLED", pooled)
    monkeypatch.setattr(figures, "cells", files.__getitem__)
    assert list(figures.effects()) == [
        "|  | 0.02 | 0.05 | 0.02 would show |",
        "| --- | ---: | ---: | ---: |",
        "| **ended** |  |  |  |",
        "| greedy | +3.0 (+1.0 to +5.0) | −1.0 (−2.0 to +0.0) | 2.8 |",
        "| warm | −2.0 (−5.9 to +1.9) |  | 5.6 |",
        "| all three | +2.0 (+0.2 to +3.8) | −1.0 (−2.0 to +0.0) | 2.5 |",
    ]


def test_a_table_across_temperatures(folder):
    columns = [["rule", ""], ["nats lost per token", ".4f"]]
    columns += [["tokens per step x strict", ".3f"], ["where answers ended", ".3f"]]
    rows = [
        *(["greedy"], ["strict", 0.0, None, None], ["a 1", [0.0201, 0, 1], [1.2, 1.1, 1.3], 1.1]),
        *(["temperature 0.4"], ["b 1", 0.0, 0.9, 0.8]),
        *(["temperature 1, K 4"], ["standard", 0.0, 0.9, 0.8], ["a 1, fixed", 0.3, 1.4, 1.0]),
    ]
    (figures.RESULTS / "new.json").write_text(
        json.dumps(TABLE | {"columns": columns, "rows": rows})
    )
    ours = "new", ("a 1", "a 1, fixed")
    assert list(
        figures.across(
            ".2f",
            {"plain": ("new", ("standard",), figures.GAIN), "a": (*ours, figures.GAIN)},
        )
    ) == [
        *("|  | greedy | temperature 1 |", "| --- | ---: | ---: |", "| plain |  | 0.90 |"),
        "| a | 1.20 (1.10–1.30) for 0.020 | 1.40 for 0.300 |",
    ]
    # One rule alone loses the same in each row.
    assert list(
        figures.across(".2f", {"a": (*ours, figures.GAIN), "ended": (*ours, figures.ENDED)})
    )[2:] == ["| a | 1.20 (1.10–1.30) | 1.40 |", "| ended | 1.10 | 1.00 |"]


def test_a_table_by_model_and_setting(folder):
    columns = [["rule", ""], ["x strict", ".3f"], ["nats per token", ".4f"]]
    model = "qwen2.5-coder-1.5b-instruct"
    rows = [
        *(["greedy, K 4"], ["strict", 1.0, 0.0], ["bound 0.02", [1.12, 1.1, 1.14], [0.023, 0, 1]]),
        *(["temperature 1, fixed drafts, K 4"], ["bound 0.02", [1.08, 1.07, 1.09], [0.02, 0, 1]]),
        *([f"{model}, temperature 1, probabilistic drafts, K 8"], ["strict", 1.0, 0.0]),
    ]
    (figures.RESULTS / "new.json").write_text(
        json.dumps(TABLE | {"columns": columns, "rows": rows})
    )
    assert list(figures.by_setting(["new"], {"0.02": "bound 0.02", "none": "strict"}, "fixed")) == [
        "|  | 0.02 | none |",
        "| --- | ---: | ---: |",
        "| **Qwen2.5-Coder-1.5B** |  |  |",
        "| temperature 1, K 8 |  | 1.000 |",
        "| **SmolLM2-135M** |  |  |",
        "| greedy | 1.120 (1.100–1.140) for 0.023 | 1.000 |",
    ]


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_no_table_is_wider_than_a_page(page):
    rules = re.findall(r"^\|(?: ?:?-+:? ?\|)+$", page.read_text(), re.M)
    assert all(rule.count("|") - 1 <= 6 for rule in rules)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "benchmarks/results")
    for name in ("benchmarks/results", "docs"):
        (tmp_path / name).mkdir(parents=True)
    results = tmp_path / "benchmarks/results"
    (results / "new.json").write_text(json.dumps(TABLE))
    (results / "index.json").write_text(json.dumps({"new": {"tells": "New ones.", "of": []}}))
    (tmp_path / "README.md").write_text("no table\n")
    return tmp_path


@pytest.mark.parametrize("before", ["| old |\n| --- |\n", "", "\n"])
def test_a_table_is_written_between_its_marks(folder, capsys, before):
    page = folder / "docs/page.md"
    page.write_text(f"x\n\n<!-- figures: new -->\n{before}<!-- /figures -->\n\ny\n")
    assert figures.main() == 0
    assert capsys.readouterr().out == "docs/page.md has new figures\n"
    assert page.read_text() == (
        "x\n\n<!-- figures: new -->\n| rule | speed |\n| --- | ---: |\n"
        "| **greedy** |  |\n| price 0.3 | 1.14 (1.09–1.20) |\n| strict |  |\n\n"
        "[Commands and figures](../benchmarks/results/new.json); "
        "commit aaaaaaa (AMD EPYC model 1).\n<!-- /figures -->\n\ny\n"
    )
    assert figures.main() == 0 and not capsys.readouterr().out


def test_a_view_of_a_table(folder):
    lines = "<!-- figures: new text -->\n<!-- /figures -->\n"
    shown = figures.written(lines, folder / "docs")
    assert shown.splitlines()[1:5] == ["| rule |", "| --- |", "| **greedy** |", "| price 0.3 |"]


def test_the_site_shows_each_table(folder):
    shown = figures.all_tables().splitlines()
    assert shown[:5] == ["## new", "", "New ones.", "", "| rule | speed |"]
    assert "| rule |" in shown, "each view has a table"


def test_a_lost_commit_is_named_by_what_landed():
    run = TABLE["runs"][0]
    lost = [{**run, "git_commit": f"{it}{'0' * 33}"} for it in ("16ddfa7", "1f32d3e")]
    assert figures.sources(lost) == "commit 3575cce, 1f32d3e (AMD EPYC model 1)"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- figures: gone -->\n<!-- /figures -->\n", "figures=gone has no benchmarks/results"),
        ("<!-- figures: new -->\n| 1 |\n", "do not go together"),
        ("<!-- figures: new -->\n<!-- figures: new -->\n<!-- /figures -->\n", "do not go together"),
    ],
)
def test_wrong_marks(folder, capsys, page, message):
    (folder / "docs/page.md").write_text(page)
    assert figures.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("error: docs/page.md: ") and message in error
    assert (folder / "docs/page.md").read_text() == page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other"}, "schema other"),
        ({"rows": [["strict", 8]]}, "does not fit 3 columns"),
    ],
)
def test_a_file_that_does_not_fit(folder, change, message):
    (figures.RESULTS / "new.json").write_text(json.dumps(TABLE | change))
    with pytest.raises(ValueError, match=message):
        figures.read("new")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vllm_mars.functions.verify.nothing", "there is no vllm_mars.functions.verify.nothing"),
        ("nothing", "there is no nothing"),
        ("vllm_mars.options.config.METHOD", "vllm_mars.options.config.METHOD has no docstring"),
    ],
)
def test_what_the_page_of_the_api_cannot_show_has_a_reason(name, reason):
    with pytest.raises(ValueError, match=f"api: {reason}"):
        reference.shown(f"<!-- api: {name} -->")


def test_the_page_of_the_api_has_each_argument_and_default():
    shown = reference.shown("Before.\n\n<!-- api: vllm_mars.ray_serve.Options -->\n")
    assert shown.startswith("Before.\n\nOptions for `serve run")
    assert "| `min_replicas` | `1` | fewest replicas;" in shown
    assert "| `routing` | `'prefix'` |" in shown and "| `runtime_env` |  |" in shown


def test_a_list_of_numbers_is_a_line(tmp_path):
    rows = [["[\n1,\n2\n]", 1.5, [-2, 3e-7, None]], ["]", [], [["ü", 1]]]]
    figures.write(tmp_path / "new/a.json", {"rows": rows})
    text = (tmp_path / "new/a.json").read_text()
    assert json.loads(text) == {"schema": figures.SCHEMA, "rows": rows}
    assert "      [-2, 3e-07, null]" in text.splitlines()


# What was set, not measured: bounds, temperatures, a price, a version, and what intervals are of.
SET = {"0.005", "0.02", "0.05", "0.3", "0.4", "0.7", "0.9", "0.32", "95 %", "80 %"}


def test_a_figure_in_the_prose_of_the_results_stands_in_a_table():
    """In one of the page, or of the files that it links to: as it is, or as a ratio in percent."""
    page = (figures.ROOT / "docs/results.md").read_text()
    linked = set(re.findall(r"results/([\w-]+)\.json", page))
    tables = [*re.findall(r"<!-- figures.*?<!-- /figures -->", page, re.S)]
    tables += ["\n".join(figures.lines(name, "", figures.ROOT)) for name in linked]
    known = set(SET)
    for cell in re.findall(r"\d+\.\d+", "".join(tables)):
        percent = abs(100 * (float(cell) - 1))
        known |= {
            cell,
            *(f"{percent:{form}}{sign}" for form in (".0f", ".1f") for sign in ("", " %")),
        }
    prose = re.sub(r"<!-- figures.*?<!-- /figures -->|\]\([^)]*\)", "", page, flags=re.S)
    told = re.findall(r"\d+\.\d+(?: %)?|\d+ %", prose)
    assert told and not [it for it in told if it not in known]
