"""The report's page as a reader sees it: in a real browser, and on paper."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from report_files import make_cell, write_sweep
from vllm_mars.cli import main
from vllm_mars.experiments.sweep.record_file import append_cell

SCREENSHOTS = Path(__file__).parents[2] / "build" / "report-screenshots"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of a sweep, made by the command."""
    directory = tmp_path_factory.mktemp("report")
    sweep = write_sweep(directory / "sweep.jsonl")
    failed = dataclasses.replace(
        make_cell("fly", None, 4, 1.0, 1, 0),
        **{"status": "unavailable", "reason": "vLLM 0.32 has no 'fly'", "speed": None},
        **{"acceptance": None, "outputs": ()},
    )
    append_cell(sweep, failed)
    page = directory / "out" / "page.html"
    assert main(["report", str(sweep), "--output", str(page)]) == 0
    return page


def test_the_page(report):
    text = report.read_text()
    assert "<script" not in text
    assert len(text) < 1_000_000
    assert text.count("<figure") == 2, "of two drafts"
    assert "vLLM 0.32 has no &#39;fly&#39;" in text
    assert "brown &amp; &#34;&lt;i&gt;" in text, "tokens are text, not markup"
    assert "<b>" not in text
    assert "&#39;my prompts.jsonl&#39;" in text
    assert "<td>45.2</td>" in text
    assert "requests at once: 1; repeats: 2." in text
    order = [text.index(it) for it in ("mars_theta&#34;: 0.96", "<figure", "<table", "<details")]
    assert order == sorted(order), "the answer, a plot, a table, then what is folded"


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


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
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
        assert page.locator(".answer").first.is_visible()
        assert not page.locator("mark").first.is_visible(), "details are folded"
        page.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
        assert problems == []
        assert requests == [report.as_uri()], "nothing else is loaded"

        assert page.evaluate("document.documentElement.scrollWidth") <= width
        plots = page.evaluate(
            """[...document.querySelectorAll('figure')].map(it => ({
                box: it.querySelector('svg').getBoundingClientRect().toJSON(),
                paper: getComputedStyle(it).backgroundColor,
                paths: it.querySelectorAll('path').length,
                text: [...it.querySelectorAll('svg text')].map(text => ({
                    words: text.textContent,
                    box: text.getBoundingClientRect().toJSON(),
                })),
            }))"""
        )
        assert len(plots) == 2
        for plot in plots:
            assert plot["box"]["width"] > 290
            assert plot["box"]["height"] > 200
            assert plot["paths"] > 10
            # Its text is black.
            assert plot["paper"] == "rgb(255, 255, 255)"
            assert {"theta", "loss, nats per token"} <= {text["words"] for text in plot["text"]}
            assert min(text["box"]["height"] for text in plot["text"]) > 8
            assert min(text["box"]["left"] for text in plot["text"]) > -1
            assert max(text["box"]["right"] for text in plot["text"]) < width + 1
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 18, 18)"}[scheme]

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


def test_on_paper(report, browser):
    """Printed from a dark screen the page is light, and its table fits an A4 sheet across."""
    sheet = 277 * 96 / 25.4
    page = browser.new_page(viewport={"width": int(sheet), "height": 700})
    try:
        page.emulate_media(media="print", color_scheme="dark")
        page.goto(report.as_uri())
        assert (
            page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        )
        assert page.locator("table").first.bounding_box()["width"] <= sheet
        assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    finally:
        page.close()
