"""The tables of the docs against the files of figures, and what these say of their runs."""

import gzip
import json
import math
import re
import shutil
import statistics
from pathlib import Path

import pytest

from benchmarks import figures
from sweep_files import PIECES, STANDARD, turn, write_sweep
from vllm_mars.experiments.records import read_sweep

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
NAMES = [
    name
    for page in figures.pages()
    for name in re.findall(r"^<!-- figures: (\S+)", page.read_text(), re.M)
    # Out of others.
    if name != "headline"
]


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_the_page_shows_what_the_files_say(page):
    text = page.read_text()
    assert figures.written(text, page.parent) == text, "`make figures` writes what the files say"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_figures_says_where_it_comes_from(name):
    path = figures.RESULTS / f"{name}.jsonl"
    if path.is_file():
        runs = [head.run for head in read_sweep(path).heads]
    else:
        found = figures.read(name)
        runs = found["runs"]
        assert found["rows"] and all(run["raw"] for run in runs)
        if any(run["raw"] != "this file" for run in runs) and not all(
            (figures.RESULTS / run["raw"]).is_file() for run in runs
        ):
            assert re.fullmatch(r"[0-9a-f]{40}", found["raw_files_at"])
    assert runs
    for run in runs:
        assert run["command"]
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", run["git_commit"])
        assert {"vllm_mars", "vllm", "torch", "python"} <= run["versions"].keys()
        assert {"cpu", "cores", "memory_gib", "gpu"} <= run["hardware"].keys()


def raw_answers(found, of, temperature, rule):
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
                own = means[prompt] = {
                    key: statistics.fmean(values[at * number : (at + 1) * number])
                    for key, values in call["answers"].items()
                }
                own |= {"further": own["tokens"] - 1, "points": 100 * own["ended"]}
    return means, nats / tokens, answers


def ratio(means, prompts, above, below):
    return sum(means[it][above] for it in prompts) / sum(means[it][below] for it in prompts)


def agrees(cell, statistic, prompts):
    """A value to its last digit, and its bootstrap's interval with that of a jackknife."""
    value, low, high = cell if isinstance(cell, list) else [cell] * 3
    assert value == pytest.approx(statistic(prompts), rel=1e-4, abs=2e-5)
    without = [statistic([it for it in prompts if it != left]) for left in prompts]
    half = 1.96 * math.sqrt((len(prompts) - 1) * statistics.pvariance(without))
    assert (high - low) / 2 == pytest.approx(half, rel=0.15, abs=1e-4)


@pytest.mark.parametrize("name", ["reading", "reading8", "exact", "exact-sampled", "ends"])
def test_the_raw_answers_give_the_figures(name):
    """By other code."""
    found, temperature, checked = figures.read(name), 0.0, 0
    titles = [title for title, *_ in found["columns"]]
    for row in found["rows"]:
        if len(row) == 1:
            temperature = 0.0 if row[0] == "greedy" else float(row[0].split()[-1])
            continue
        told = dict(zip(titles, row, strict=True))
        of = name.rstrip("8").removesuffix("-sampled"), temperature
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
            checked += 1
    assert checked


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "benchmarks/results")
    monkeypatch.setattr(figures, "PICTURE", tmp_path / "docs/tokens_by_nats.png")
    for name in ("benchmarks/results", "docs"):
        (tmp_path / name).mkdir(parents=True)
    results = tmp_path / "benchmarks/results"
    shutil.copy(Path(figures.__file__).with_name("results") / "demo.jsonl", results)
    columns = [["rule", ""], ["nats lost per token", ".4f"], ["tokens per step", ".2f"]]
    names = "standard, fixed drafts", "strict", "mars_max_loss 0.02", "mars_theta 0.9"
    rows = [["temperature 1"], *([name, 0.02, [1.2, 1.1, 1.3]] for name in names)]
    (results / "reading.json").write_text(json.dumps(TABLE | {"columns": columns, "rows": rows}))
    (results / "new.json").write_text(json.dumps(TABLE))
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
    (folder / "docs/sweep.md").write_text("<!-- figures: demo -->\n<!-- /figures -->\n")
    assert figures.main() == 0
    assert "| tokens per step" in (folder / "docs/sweep.md").read_text()
    capsys.readouterr()
    assert (folder / "docs/tokens_by_nats.png").read_bytes().startswith(b"\x89PNG")
    assert figures.main() == 0 and not capsys.readouterr().out


def test_a_view_of_a_table(folder):
    lines = "<!-- figures: new text -->\n<!-- /figures -->\n"
    shown = figures.written(lines, folder / "docs")
    assert shown.splitlines()[1:5] == ["| rule |", "| --- |", "| **greedy** |", "| price 0.3 |"]


def test_answers_of_a_sweep(folder):
    """Whatever they hold stays text, in its cell."""
    strict, own = (STANDARD._replace(name=name) for name in ("standard", "MARS"))
    records = [turn(strict, nll=21), turn(own, lost=0.8, nll=42, pieces=PIECES)]
    path = write_sweep(folder / "benchmarks/results/beside.jsonl", records)
    path.write_text(
        path.read_text().replace('"p0"', '"list-office"').replace('"p1"', '"story-bridge"')
    )
    page = "<!-- figures: beside examples -->\n<!-- /figures -->\n"
    shown = figures.written(page, folder / "docs").splitlines()
    assert shown[1].startswith("MARS changed 2 greedy answers.")
    assert shown[3] == "**The one that changed least.** The prompt:"
    assert shown[5].startswith("> ")
    assert shown[7:10] == [
        *("| strict | MARS, 0.75 nats lost |", "| --- | --- |"),
        r"| text | The <b>red</b> fox &lt;b&gt;<br><b>\|</b> end |",
    ]
    assert "[Commands and figures](../benchmarks/results/beside.jsonl); commit 0123456" in shown[-2]
    write_sweep(folder / "benchmarks/results/none.jsonl", [turn(strict), turn(own)])
    with pytest.raises(ValueError, match="no answer that MARS changed"):
        figures.written(page.replace("beside", "none"), folder / "docs")


def test_how_fast_each_k_is(folder):
    records = [
        turn(STANDARD._replace(name=f"{rule}, K {k}", temperature=temperature), token_seconds=took)
        for rule, temperature, k, took in (
            *(("strict", 0.0, 2, 0.02), ("strict", 0.0, 3, 0.03)),
            *(("MARS", 1.0, 2, 0.02), ("MARS", 1.0, 3, 0.01)),
        )
    ]
    # Another turn of the last, while the machine did other work.
    records.append(turn(records[-1].cell, 1, token_seconds=0.04))
    write_sweep(folder / "benchmarks/results/ks.jsonl", records, "strict, K 2")
    page = "<!-- figures: ks lengths -->\n<!-- /figures -->\n"
    # 0.1 s to the first token, 20 more at 1.05 of that time on average.
    assert figures.written(page, folder / "docs").splitlines()[1:5] == [
        *("| s per answer | K 2 | K 3 |", "| --- | ---: | ---: |"),
        "| strict, greedy | 0.52 | 0.73 |",
        "| MARS, temperature 1 | 0.52 | 0.69 (uneven) |",
    ]


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
