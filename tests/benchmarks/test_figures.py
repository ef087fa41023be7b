"""Tables of the pages against the files of figures, and these against their raw files."""

import json
import re

import pytest

from benchmarks import figures, reference, text

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
# All but the file of a picture.
NAMES = [name for name in figures.index() if name != "step"]


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_a_page_shows_the_figures_of_the_files(page):
    content = page.read_text()
    assert figures.written(content, page.parent) == content, "run `make figures`"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_figures_names_its_sources(name):
    file = figures.read(name)
    runs = file["runs"]
    assert runs and file["rows"] and all(run["raw"] for run in runs)
    if any(run["raw"] != "this file" for run in runs) and not all(
        (figures.RESULTS / run["raw"]).is_file() for run in runs
    ):
        assert re.fullmatch(r"[0-9a-f]{40}", file["raw_files_at"])
    for run in runs:
        assert run["command"]
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", run["git_commit"])
        assert {"vllm_mars", "vllm", "torch", "python"} <= run["versions"].keys()
        assert {"cpu", "cores", "memory_gib", "gpu"} <= run["hardware"].keys()


def test_the_raw_answers_give_the_figures(tmp_path):
    file = figures.read("answers")
    raw = dict.fromkeys(str(figures.RESULTS / run["raw"]) for run in file["runs"])
    output = tmp_path / "new.json"
    text.main(["--report", *raw, f"--figures={output}"])
    assert json.loads(output.read_text())["rows"] == file["rows"]


def test_a_table_by_model_and_setting(folder):
    columns = [["rule", ""], ["x strict", ".3f"], ["nats per token", ".4f"], ["ended", "+.1f"]]
    model = "qwen2.5-coder-1.5b-instruct"
    rows = [
        ["greedy, K 4"],
        ["strict", 1.0, 0.0, None],
        ["bound 0.02", [1.12, 1.1, 1.14], [0.023, 0, 1], [-1.0, -2.0, 0.5]],
        ["temperature 1, fixed drafts, K 4"],
        ["bound 0.02", [1.08, 1.07, 1.09], [0.02, 0, 1], None],
        [f"{model}, temperature 1, probabilistic drafts, K 8"],
        ["strict", 1.0, 0.0, None],
    ]
    file = TABLE | {"columns": columns, "rows": rows}
    (figures.RESULTS / "new.json").write_text(json.dumps(file))
    shown = {
        "0.02": ("bound 0.02", "x strict"),
        "none": ("strict", "x strict"),
        "ended": ("bound 0.02", "ended"),
    }
    assert list(figures.by_setting(["new"], shown, "fixed")) == [
        "|  | 0.02 | none | ended |",
        "| --- | ---: | ---: | ---: |",
        "| **Qwen2.5-Coder-1.5B** |  |  |  |",
        "| temperature 1, K 8 |  | 1.000 |  |",
        "| **SmolLM2-135M** |  |  |  |",
        "| greedy | 1.120 (1.100–1.140) for 0.023 | 1.000 | −1.0 (−2.0 to +0.5) |",
    ]


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_no_table_has_more_than_six_columns(page):
    separators = re.findall(r"^\|(?: ?:?-+:? ?\|)+$", page.read_text(), re.M)
    assert all(separator.count("|") - 1 <= 6 for separator in separators)


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


def test_a_lost_commit_is_replaced_by_the_landed_one():
    run = TABLE["runs"][0]
    lost = [{**run, "git_commit": f"{c}{'0' * 33}"} for c in ("16ddfa7", "1f32d3e")]
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
    [({"schema": "other"}, "schema other"), ({"rows": [["strict", 8]]}, "does not fit 3 columns")],
)
def test_a_malformed_file(folder, change, message):
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
def test_refused_names_of_the_api_page(name, reason):
    with pytest.raises(ValueError, match=f"api: {reason}"):
        reference.shown(f"<!-- api: {name} -->")


def test_the_api_page_has_each_argument_and_default():
    shown = reference.shown("Before.\n\n<!-- api: vllm_mars.ray_serve.Options -->\n")
    assert shown.startswith("Before.\n\nOptions for `serve run")
    assert "| `min_replicas` | `1` | fewest replicas;" in shown
    assert "| `routing` | `'prefix'` |" in shown and "| `runtime_env` |  |" in shown


# Settings, not measurements: bounds, temperatures, a price, a version, levels of intervals.
SET = {"0.005", "0.02", "0.05", "0.3", "0.4", "0.7", "0.9", "0.32", "95 %", "80 %"}


def test_a_figure_in_the_prose_of_the_results_is_in_a_table():
    """A table of the page or of a linked file has it, maybe as a ratio."""
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
    stated = re.findall(r"\d+\.\d+(?: %)?|\d+ %", prose)
    assert stated and not [figure for figure in stated if figure not in known]
