"""The report: what it draws from records, what it says of missing data, and a real browser."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
from matplotlib.image import imread

from vllm_mars.cli import main
from vllm_mars.experiments.report.page import load_runs, sections, write_report
from vllm_mars.experiments.report.plots import Plot, Series, frontier, lines, pareto
from vllm_mars.experiments.report.tables import Piece, pieces
from vllm_mars.experiments.sweep.record_file import append_cell, append_quality
from vllm_mars.experiments.sweep.records import (
    Acceptance,
    Cell,
    CellKey,
    Estimate,
    OffChoice,
    Output,
    PromptQuality,
    Quality,
    Settings,
    Speed,
)

SCREENSHOTS = Path(__file__).parents[2] / "build" / "report-screenshots"
ANSWER = "The red fox <b>jumps</b> over\nthe lazy dog."
RULES = [
    ("autoregressive", None, 0, 20.0, 0.50),
    ("standard", None, 4, 36.0, 0.50),
    ("mars", 0.9, 4, 45.0, 0.56),
    ("mars", 0.98, 4, 40.0, 0.51),
    ("standard", None, 8, 38.0, 0.50),
    ("mars", 0.9, 8, 50.0, 0.57),
]
PROMPTS = ("a", "b", "c", "d")


def make_cell(method, theta, k, speed, concurrency, repeat):
    is_mars = method == "mars"
    key = CellKey(
        **{"model": "tiny", "draft": "ngram" if k else "none", "method": method},
        **{"metric": "ratio" if is_mars else None, "theta": theta, "gap": None},
        **{"protected": True if is_mars else None, "k": k, "temperature": 0.0},
        **{"concurrency": concurrency, "dataset": "prompts", "repeat": repeat},
    )
    seconds = 400 / (speed * math.sqrt(concurrency) * (1 + 0.01 * repeat))
    by_position = tuple(30 // (i + 1) for i in range(k))
    return Cell(
        key=key,
        status="ok",
        reason="",
        settings=Settings(64, {"prompts": 4}, 0, ()),
        theta_set_by="request" if is_mars else None,
        speed=Speed(seconds, 4, 0, 40, 400),
        acceptance=Acceptance(60, 60 * k, sum(by_position), by_position) if k else None,
        outputs=tuple(
            Output(name, ANSWER + name, 10, 100, "stop", seconds / 4, 0.1, 0.0) for name in PROMPTS
        ),
        created="2026-01-01T00:00:00+00:00",
        node="host",
        git_commit="0123456789abcdef0123",
        versions={"vllm": "0.32.0", "torch": "2.13.0"},
        hardware={"cpu": "x", "cores": 2, "memory_gib": 1.5, "gpu": None},
        command=("vllm-mars", "sweep", "--dataset", "my prompts.jsonl"),
    )


def make_quality(cell, nll):
    off_choice = ()
    if cell.key.lossy:
        off_choice = (
            OffChoice(1, 4, 7, "red", math.log(0.25), 'brown & "<i>', math.log(0.5)),
            OffChoice(3, 15, 20, "jumps", math.log(0.3), "runs", math.log(0.4)),
        )
    scores = [
        {"nll": nll + 0.01 * i, "exact_match": float(i > 0), "chrf": 0.9, "seconds": 2.0}
        for i in range(len(PROMPTS))
    ]
    return Quality(
        prompts=tuple(
            PromptQuality(name, values, off_choice)
            for name, values in zip(PROMPTS, scores, strict=True)
        ),
        # The report pools the scores over repeats itself.
        estimates=(Estimate("nll", 4, nll, nll, nll),),
    )


def write_sweep(path, rules=RULES, concurrencies=(1, 4), judged=True):
    cells = [
        (make_cell(method, theta, k, speed, concurrency, repeat), nll)
        for method, theta, k, speed, nll in rules
        for concurrency in concurrencies
        for repeat in range(2)
    ]
    for cell, _ in cells:
        append_cell(path, cell)
    if judged:
        for cell, nll in cells:
            append_quality(path, cell.key, make_quality(cell, nll))
    return path


def write_calibration(path):
    measure = {"value": 0.009, "low": 0.007, "high": 0.0098, "kept_share": 0.99}
    content = {
        **{"kind": "calibration", "schema": 1, "metric": "ratio", "threshold": 0.96},
        **{"budget": 0.01, "model": {"name": "tiny"}, "draft": {"name": "ngram"}},
        "recovery": None,
        "samples": {"held_out_prompts": 8},
        "curve": [
            {"threshold": t / 100, "cost": (100 - t) / 400, "high": (100 - t) / 350}
            for t in range(80, 101)
        ],
        "confirmations": [
            {
                **{"threshold": 0.96, "predicted": 0.01, "cost": measure, "kept": True},
                "nll_increase": {"value": -0.01, "low": -0.03, "high": 0.01, "kept_share": 0.95},
            }
        ],
        "margins": {
            "edges": [i / 10 for i in range(11)],
            "positions": [0, 1, 2, 4, 8, 8, 9, 10, 12, 30],
            "runner_up": [0, 0, 0, 1, 1, 1, 2, 2, 2, 8],
            "not_positive": 1,
        },
    }
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of a sweep and a calibration, made by the command."""
    directory = tmp_path_factory.mktemp("report")
    sweep = write_sweep(directory / "sweep.jsonl")
    failed = dataclasses.replace(
        make_cell("fly", None, 4, 1.0, 1, 0),
        **{"status": "unavailable", "reason": "vLLM 0.32 has no 'fly'", "speed": None},
        **{"acceptance": None, "outputs": ()},
    )
    append_cell(sweep, failed)
    calibration = write_calibration(directory / "calibration.json")
    page = directory / "out" / "page.html"
    assert main(["report", str(sweep), str(calibration), "--output", str(page)]) == 0
    return page


def by_name(paths):
    return {section.name: section for section in sections(load_runs(paths))}


def test_every_section_is_drawn(tmp_path):
    found = by_name([write_sweep(tmp_path / "s.jsonl"), write_calibration(tmp_path / "c.json")])
    assert {name: section.missing for name, section in found.items()} == dict.fromkeys(found, "")
    plots = {name: [plot.name for plot in section.plots] for name, section in found.items()}
    # Two concurrencies, three scores.
    assert len(plots["pareto"]) == 6
    assert "pareto-tiny-temperature-0-prompts-concurrency-1-nll" in plots["pareto"]
    assert plots["acceptance"] == [f"acceptance-tiny-temperature-0-ngram-K{k}" for k in (4, 8)]
    assert plots["margins"] == ["margins-c", "calibration-c"]
    assert len(plots["load"]) == 1
    assert len(plots["drafts"]) == 2
    (one, *_) = found["relaxed"].answers
    assert one.count == 2
    speeds = {row[0] + row[1]: row[5:8] for row in found["pareto"].tables[0].rows if row[4] == "1"}
    assert speeds["mars 0.9ngram K4"] == ["45.2", "2.25", "1.25"]


def test_who_is_beaten(tmp_path):
    found = by_name([write_sweep(tmp_path / "s.jsonl")])
    notes = {plot.name.rsplit("-", 1)[1]: plot.note for plot in found["pareto"].plots}
    # K 8 is faster at the same quality; the autoregressive point is slower than strict.
    assert notes["nll"] == (
        "Beaten by no other rule: mars 0.9 ngram K4, mars 0.9 ngram K8, mars 0.98 ngram K4, "
        "standard ngram K8."
    )


@pytest.mark.parametrize(
    ("section", "command"),
    [
        ("pareto", "`vllm-mars sweep` measures and judges them"),
        ("acceptance", "`vllm-mars sweep` gives them"),
        ("load", "`vllm-mars sweep --concurrency 1 4 16 64` measures them"),
        ("drafts", "`vllm-mars sweep --draft ngram DIR` or `--k 2 4 8` measures them"),
        ("relaxed", "`vllm-mars sweep` judges its answers unless"),
    ],
)
def test_missing_data_is_named(tmp_path, section, command):
    found = by_name([write_calibration(tmp_path / "c.json")])
    assert command in found[section].missing
    assert not found[section].plots
    assert not found["margins"].missing


def test_a_calibration_with_a_task_score_as_budget(tmp_path):
    path = write_calibration(tmp_path / "c.json")
    content = json.loads(path.read_text()) | {"budget": None, "recovery": 0.98}
    left = {"value": 0.99, "low": 0.95, "high": 1.0, "kept_share": 0.91}
    content["confirmations"][0]["recovery"] = left
    path.write_text(json.dumps(content))
    write_report([path], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    for cell in ("recovery 0.98", "0.990 [0.950, 1.000]", "91%"):
        assert cell in text


def test_a_sweep_alone_lacks_margins(tmp_path):
    sweep = write_sweep(tmp_path / "s.jsonl", RULES[:3], (1,), judged=False)
    found = by_name([sweep])
    assert "`vllm-mars calibrate` records" in found["margins"].missing
    assert found["load"].missing
    assert found["drafts"].missing
    assert found["pareto"].missing
    assert found["acceptance"].plots


def test_files_and_pngs(report):
    text = report.read_text()
    assert "http" not in text.replace("http://www.w3.org/", ""), "nothing is loaded from elsewhere"
    assert "<script" not in text
    assert len(text) < 1_000_000
    pngs = sorted(path.name for path in report.with_suffix("").iterdir())
    assert len(pngs) == text.count("<figure") == 13
    assert all((report.with_suffix("") / name).read_bytes()[:4] == b"\x89PNG" for name in pngs)
    assert "vLLM 0.32 has no &#39;fly&#39;" in text
    assert "brown &amp; &#34;&lt;i&gt;" in text, "tokens are text, not markup"
    assert "<b>" not in text
    assert "&#39;my prompts.jsonl&#39;" in text


def test_ids_differ(report):
    import re

    ids = re.findall(r'\bid="([^"]+)"', report.read_text())
    assert len(ids) == len(set(ids))
    targets = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', report.read_text())
    assert {one or other for one, other in targets} <= set(ids)


def test_pieces():
    text = "abcdef"
    tokens = [OffChoice(1, 2, 4, "cd", 0.0, "X", 0.0), OffChoice(2, 3, 4, "d", 0.0, "Y", 0.0)]
    assert pieces(text, tokens) == [Piece("ab"), Piece("cd", "X"), Piece("ef")]
    assert pieces(text, []) == [Piece("abcdef")]
    assert pieces("ab", [OffChoice(0, 0, 2, "ab", 0.0, "X", 0.0)]) == [Piece("ab", "X")]


def test_frontier():
    points = [(1.0, 5.0), (2.0, 5.0), (3.0, 4.0), (2.5, 3.0), (4.0, 1.0), (4.0, 0.5)]
    assert frontier(points, higher=True) == [(2.0, 5.0), (3.0, 4.0), (4.0, 1.0)]
    assert frontier(points, higher=False) == [(4.0, 0.5)]


def test_a_plot_follows_the_page_and_stays_the_same():
    plot = Plot("one", 'a "title"', "", lines([Series("s", [1, 2], [3, 4])], "x", "y"))
    svg = plot.svg()
    assert svg == plot.svg()
    assert "var(--ink)" in svg
    assert "var(--series-0)" in svg
    assert "#01030" not in svg
    assert 'aria-label="a &quot;title&quot;"' in svg
    assert "DejaVu" not in svg
    assert pareto([Series("s", [1], [2])], "x", "y", higher=True)


def test_a_long_title_stays_within_the_png(tmp_path):
    draw = pareto([Series("s", [1], [2])], "x", "y", higher=True)
    Plot("p", "pass@1, recovery, temperature 0, " * 4, "", draw).png(tmp_path / "p.png")
    image = imread(tmp_path / "p.png")
    assert (image[:, [0, -1], :3] == 1).all(), "nothing is drawn at the sides"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.txt", "", "is neither a sweep (.jsonl) nor a calibration (.json); give files"),
        ("run.json", "{}", "is not a calibration"),
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
    calibration = write_calibration(tmp_path / "c.json")
    with pytest.raises(RuntimeError, match="output=/proc/none/page.html cannot be written"):
        write_report([calibration], Path("/proc/none/page.html"))


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on PATH: apt install chromium")
    with playwright.sync_playwright() as driver:
        # In a container the browser's own sandbox cannot start.
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(report, browser, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    try:
        page.goto(report.as_uri())
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"report-{width}-{scheme}.png", full_page=True)
        assert problems == []
        assert requests == [report.as_uri()], "nothing else is loaded"

        assert page.evaluate("document.documentElement.scrollWidth") <= width
        plots = page.evaluate(
            """[...document.querySelectorAll('figure svg')].map(svg => ({
                width: svg.getBoundingClientRect().width,
                height: svg.getBoundingClientRect().height,
                // Marks and text that are really painted, in a colour of the page.
                drawn: [...svg.querySelectorAll('path, use')].filter(
                    it => it.getBoundingClientRect().width > 0).length,
                text: [...svg.querySelectorAll('text')].map(it => ({
                    fill: getComputedStyle(it).fill,
                    size: it.getBoundingClientRect().height,
                    left: it.getBoundingClientRect().left - svg.getBoundingClientRect().left,
                    right: svg.getBoundingClientRect().right - it.getBoundingClientRect().right,
                })),
            }))"""
        )
        assert len(plots) == 13
        ink = page.evaluate("getComputedStyle(document.body).color")
        for plot in plots:
            assert plot["width"] > 300
            assert plot["height"] > 200
            assert plot["drawn"] > 10
            assert {text["fill"] for text in plot["text"]} == {ink}
            assert min(text["size"] for text in plot["text"]) > 8
            assert min(min(text["left"], text["right"]) for text in plot["text"]) > -1
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 27)"}[scheme]

        token = page.locator("mark").first
        choice = token.locator(".choice")
        assert not choice.is_visible()
        token.focus()
        assert choice.is_visible()
        assert "the target's choice: “brown & \"<i>” (p 0.50), this token: p 0.25" in (
            choice.inner_text()
        )
        box = choice.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        page.evaluate("document.activeElement.blur()")
        page.locator("mark").nth(1).hover()
        assert page.locator(".choice").nth(1).is_visible()
    finally:
        page.close()
