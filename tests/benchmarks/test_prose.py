"""The figures in the prose of pages, recomputed from their files.

Where a file has new numbers, a failure tells the words that stand for them. In the README and the
results a figure that no line here knows fails as well.
"""

import json
import math
import re

import numpy as np
import pytest

from benchmarks import figures
from vllm_mars.experiments.records import read_sweep
from vllm_mars.experiments.rows import rows
from vllm_mars.kernels.terms import LOSS_BITS, loss_rate, most_lost

# What was set, not measured: bounds, temperatures, rules, and versions.
SET = {"0.005", "0.02", "0.05", "0.4", "0.7", "0.9", "0.96"} | {"0.1.0", "0.32", "0.32.0", "0.33"}
# Of Python and of the license, too.
SET |= {"3.11", "3.13", "2.0"}
LOST = "nats lost per token"
REPEATED = "repeated 4-grams less strict's"
COOL = "temperature 0.4", figures.BOUND, "tokens per step x strict"
# Of the rule before commit 3575cce, by the table of 78154b8: what a bound of 0.02 ended, and tokens
# per step over strict ones.
OLD_RULE = "2.8 (1.3 to 4.2)"
OLD_GAINS = {
    ("reading", "greedy"): 1.157,
    ("reading8", "greedy"): 1.212,
    ("reading", "temperature 0.7"): 1.078,
    ("reading8", "temperature 0.7"): 1.079,
    ("reading", "temperature 1"): 1.128,
    ("reading8", "temperature 1"): 1.169,
}


def found(name, heading, rule, column):
    (cell,) = (row[column] for *at, row in figures.cells(name) if at == [heading, rule])
    return cell


def in_words(cell, form=".2f"):
    return "{} ({} to {})".format(*(format(it, form) for it in cell))


def speed(temperature):
    """Of the demo's whole answers."""
    (row,) = (
        it
        for it in rows(read_sweep(figures.RESULTS / "demo.jsonl"))
        if it.cell.name == "MARS" and it.cell.temperature == temperature
    )
    # They say nothing of how long answers would be.
    assert row.ended.value <= 0.1
    return in_words(row.speed)


def beside_fly(rule):
    gain, lost = (
        next(row[column] for _, name, row in figures.cells("fly") if name == rule)
        for column in ("tokens per step x strict", "nats lost per token")
    )
    return figures.text(gain, ".2f"), f"{lost[0]:.3f}"


def minus(told):
    """With the sign that prose has."""
    return told.replace("-", "−")


def effect(begin, at):
    """A cell of the table of what bounds do to text: its value and both ends."""
    rows = (it.split("|") for it in figures.effects("all"))
    cell = next(row[at + 1] for row in rows if row[1].strip().startswith(begin))
    return [float(it) for it in re.findall(r"[+-]?[\d.]+", cell)]


def fewer_ends():
    value, low, high = effect(figures.ALL, 2)
    assert value < 0
    return f"{-value:.1f} fewer ({-low:.1f} fewer to {high:.1f} more"


def beside_strict(name, column, form):
    """By temperature."""
    return [
        minus(in_words(row[column], form))
        for _, rule, row in figures.cells(name)
        if rule == figures.BOUND
    ]


def ends_of(name):
    return beside_strict(name, "ended less strict's, points", "+.1f")


def of_kinds(heat, column):
    return {
        kind: row[f"served / target, {column}"]
        for heading, kind, row in figures.cells("tokens")
        if heading.endswith(heat)
    }


def leans():
    """How much more often served text has what its draft has."""
    warm, hot = (of_kinds(heat, "by reports") for heat in ("temperature 0.7", "temperature 1"))

    def told(kind):
        return [f"{of[kind][0]:.2f}" for of in (warm, hot)]

    ends, breaks, capitals = map(told, ("sentence ends", "line breaks", "capitals"))
    return (
        f"end {ends[0]} times as often at temperature 0.7 and {ends[1]} times at 1, lines break "
        f"{breaks[0]} and {breaks[1]} times, and words begin with capitals {capitals[0]} and "
        f"{capitals[1]} times"
    )


def repeats():
    """By a forward pass: of all n-grams, and of those beyond chance."""
    found = [
        (heat, kind, cell)
        for heat in ("temperature 0.4", "temperature 0.7", "temperature 1")
        for kind, cell in of_kinds(heat, "by a forward pass").items()
        if "again" in kind
    ]
    values = [cell[0] for *_, cell in found]
    ((heat, kind, cell),) = (it for it in found if it[2][1] > 1)
    return (
        f"here {min(values):.2f} to {max(values):.2f}, above 1 beyond chance only for "
        f"{kind.removesuffix(' again')} at {heat}, at {cell[0]:.3f}"
    )


def line_breaks():
    """Of relaxed tokens, and of the first choices in their places."""
    (row,) = (
        row
        for heading, kind, row in figures.cells("tokens")
        if heading.endswith("greedy") and kind == "line breaks"
    )
    return row["came"], round(row["came"] / row["served / target, by a forward pass"])


def steps():
    """Whole steps: MARS's time over others', by the model."""
    found = {}
    for row in figures.read("steps")["rows"]:
        model, requests, heat = row[0].split(", ")
        found.setdefault(model, []).append((requests, heat, *row[1:5]))

    def span(values, form=".2f"):
        return f"{min(values):{form}} to {max(values):{form}}"

    large, small = found["8b"], found["packaged"]
    needed = {
        requests: span([mars / none for of, _, none, *_, mars in large if of == requests])
        for requests in ("1", "8", "64")
    }
    longer = [100 * (mars / standard - 1) for *_, standard, _, mars in large]
    greedy = [mars / of for _, heat, _, *own, mars in small if heat == "0" for of in own]
    hot = [100 * (mars / min(own) - 1) for _, heat, _, *own, mars in small if heat == "1"]
    rounds = [[time for time, _ in it[4:]] for it in figures.read("steps")["raw"]]
    uneven = max(max(of) / min(of) for of in rounds)
    return {
        "large": f"takes {span(longer, '.1f')} % longer",
        "needed": f"{needed['1']} for 1 request at a time, {needed['8']} for 8, {needed['64']} for",
        "greedy": f"takes {span(greedy)} times as long as with vLLM's two",
        "uneven": f"differ by up to {uneven:.1f} times",
        "hot": f"{span(hot, '.0f')} % longer than",
    }


def host(heat, drafts, beside):
    """Of the kernels' table: microseconds of the host over vLLM's, and those of one request."""
    rows = {
        int(name.split()[-1]): row
        for _, name, row in figures.cells("kernel")
        if name.startswith(f"{heat}, {drafts} drafts")
    }
    ours, theirs = (f"{it}, us of the host" for it in ("MARS, max_loss 0.02", f"vLLM, {beside}"))
    each = [row[ours][0] / row[theirs][0] for row in rows.values()]
    return f"{min(each):.2f} to {max(each):.2f} times", (
        f"{rows[1][ours][0]:.0f}", f"{rows[1][theirs][0]:.0f}"
    )  # fmt: skip


def device(heat, drafts, beside):
    rows = [
        row
        for _, name, row in figures.cells("kernel")
        if name.startswith(f"{heat}, {drafts} drafts")
    ]
    each = [row["MARS, max_loss 0.02, us"][0] / row[f"vLLM, {beside}, us"][0] for row in rows]
    return f"{min(each):.2f} to {max(each):.2f} times"


def of_kernels():
    greedy, fixed = (host(heat, "fixed", "standard") for heat in ("temperature 0", "temperature 1"))
    drawn = host("temperature 1", "probabilistic", "block")
    row = next(
        row
        for _, name, row in figures.cells("kernel")
        if name == "temperature 1, probabilistic drafts, batch 64"
    )
    columns = "MARS, max_loss 0.02, us", "vLLM, block, us", "vLLM, standard, us"
    mars, block, standard = (f"{row[of][0]:.0f}" for of in columns)
    drawn_rows = "temperature 1", "probabilistic"
    return [
        f"greedily {device('temperature 0', 'fixed', 'standard')} vLLM's time",
        f"with fixed drafts at temperature 1 {device('temperature 1', 'fixed', 'standard')}",
        f"takes {device(*drawn_rows, 'block')} that of `block`",
        f"and {device(*drawn_rows, 'standard')} that of `standard`",
        f"for 64 requests {mars} µs beside {block} and {standard}",
        f"greedily {greedy[0]} as long as vLLM's ({' µs beside '.join(greedy[1])} for one request)",
        f"with fixed drafts {fixed[0]} ({' beside '.join(fixed[1])})",
        f"with probabilistic drafts {drawn[0]} as long as `block` ({' beside '.join(drawn[1])})",
    ]


def at_best_k():
    large, many, small, small_many = (
        figures.text(row["MARS / lossless"], ".2f") for *_, row in figures.cells("controls-k")
    )
    return (
        f"{large} times the lossless tokens per second for one request and {many} times for 32, "
        f"with those of the packaged model {small} and {small_many} times"
    )


def weights():
    ends = [
        figures.text(found("ends", heat, figures.BOUND, "mean weight of a token"), ".4f")
        for heat in ("temperature 0.4", "temperature 0.7")
    ]
    at_1 = found("reading", "temperature 1", figures.BOUND, "mean weight of a token")
    return (
        f"{ends[0]} at temperature 0.4 and {ends[1]} at 0.7, over 1,044 answers each, "
        f"and {figures.text(at_1, '.4f')} at 1, over 182"
    )


def costs():
    """What today's guard costs."""
    told = {
        at: f"{found(*at, figures.BOUND, 'tokens per step x strict')[0]:.3f} and {old:.3f}"
        for at, old in OLD_GAINS.items()
    }
    return [
        f"{told['reading', heat]}, with eight drafts {told['reading8', heat]}"
        for heat in ("greedy", "temperature 0.7", "temperature 1")
    ]


def tasks():
    """How many were right at the price, and what that could have shown."""
    told, theta = {}, []
    for _, name, row in figures.cells("tasks"):
        none, price = row["no drafts"], row["price 0.3, bound 0.02"]
        told[name] = price, row["of"], none
        theta.append(row["theta 0.9"] < none)
    assert (sum(theta), len(theta)) == (5, 6)
    (price, of, none) = told["facts"]
    others = ", ".join(
        "{} of {} {} ({})".format(*told[name][:2], called, told[name][2])
        for name, called in (("functions", "functions"), ("SQL rows", "SQL rows"))
    )
    objects = "{} of {} JSON objects ({})".format(*told["JSON"])
    # Its interval is of commit c5e95dc, whose raw files are at 247e1bd.
    low, high = -0.028, 0.065
    shown = figures.FOUND * (high - low) / (2 * 1.96)
    told = f"+{(price - none) / of:.3f} (−{-low} to {high}) of them"
    return [
        f"{price} of {of} facts were right ({none} without drafts), {others} and {objects}",
        *(told, f"So many would have shown {shown:.3f}", "got fewer right in five of six sets"),
    ]


def step():
    told = json.loads((figures.RESULTS / "step.json").read_text())
    return f"for {told['nats']:.2f} nats"


def allowed(tokens):
    return 2.0**-LOSS_BITS * most_lost(loss_rate(0.02), tokens) / tokens


def phrases(page):
    fly, fly_lost = beside_fly("`fly`, its defaults (window 3)")
    mars, mars_lost = beside_fly("mars_max_loss 0.02")
    gains = [
        row["tokens per step x strict"][0]
        for _, rule, row in figures.cells("reading")
        if rule == figures.BOUND
    ]
    plain = [
        found("reading", heat, "standard, fixed drafts", "tokens per step x strict")[0]
        for heat in ("temperature 1", "temperature 0.7")
    ]
    return {
        "README.md": [
            f"{min(gains):.2f} to {max(gains):.2f} times the tokens per step",
            f"At temperature 0.4 it was {figures.text(found('reading', *COOL), '.2f')} times",
            f"of 100 answers {fewer_ends()}",
            f"{speed(0.0)} times as fast as strictly",
            f"`fly` gave {fly} times the tokens per step for {fly_lost} nats per token",
            f"MARS {mars} times for {mars_lost}",
            f"a token that costs {math.log(2):.1f} nats is half as probable",
            step(),
            *(steps()[it] for it in ("large", "hot")),
        ],
        "docs/results.md": [
            *("at a [price] of 0.3", *tasks()),
            f"came {speed(0.0)} times as fast as strictly",
            f"at temperature 0.7 {speed(0.7)} times as fast as in the best lossless setting",
            f"lost [{found('ends', 'temperature 0.7', figures.BOUND, LOST):.4f}] at",
            "at 0.02 greedily {} points, at temperature 0.7 {}.".format(*ends_of("ends")[::2]),
            f"alone show {beside_strict('reading', REPEATED, '+.3f')[2]} at 0.02",
            "brings little**: {}, with eight drafts {}.".format(
                *(figures.text(found(name, *COOL), ".2f") for name in ("reading", "reading8"))
            ),
            f"they are greedily {ends_of('reading')[0]}.",
            leans(),
            repeats(),
            "Greedily {} relaxed tokens break a line, where {} of".format(*line_breaks()),
            at_best_k(),
        ],
        "docs/one-gpu.md": list(steps().values()),
        "docs/kernel.md": of_kernels(),
        "docs/rollouts.md": [weights()],
        "benchmarks/results/README.md": [
            f"it ended {OLD_RULE} points fewer",
            *costs(),
            "strict's: {}, {} and {}.".format(*beside_strict("ends", REPEATED, "+.3f")),
            f"it brought {figures.text(found('ends', *COOL), '.2f')} times the tokens per step",
            f"complete {of_kinds('greedy', 'by a forward pass')['2-grams again'][0]:.2f} times",
            "a line {} times, where {} of".format(*line_breaks()),
            tasks()[1],
        ],
        "docs/choosing.md": [
            f"reaches [{plain[0]:.2f} of their tokens per step]",
            f"at 0.7 {plain[1]:.2f}, and they lose nothing",
            f"from {allowed(10):.2f} nats at 10 tokens to {allowed(400):.3f} at 400",
        ],
    }[page]


def prose(page):
    """A page's text, without tables, code and what links lead to."""
    text = (figures.ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- figures.*?<!-- /figures -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return " ".join(text.split())


@pytest.mark.parametrize(
    "page",
    [
        *("README.md", "docs/results.md", "docs/choosing.md", "docs/one-gpu.md", "docs/kernel.md"),
        *("docs/rollouts.md", "benchmarks/results/README.md"),
    ],
)
def test_the_prose_says_what_the_files_say(page):
    text = prose(page)
    for phrase in phrases(page):
        assert phrase in text


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_each_figure_in_prose_is_known(page):
    text = prose(page)
    for phrase in phrases(page):
        text = text.replace(phrase, "")
    assert set(re.findall(r"\d+(?:\.\d+)+", text)) <= SET


def test_what_is_said_of_rivals():
    for heading, rule, row in figures.cells("rivals"):
        if heading == "greedy":
            assert row["K 4: a price at this loss"][0] > row["K 4: tokens per step"][0], rule
    fly, bound = (
        next(row["tokens per step x strict"] for _, name, row in figures.cells("fly") if name == it)
        for it in ("`fly`, its defaults (window 3)", "mars_max_loss 0.02")
    )
    assert fly[2] > bound[1], "their intervals overlap"


def test_what_is_said_of_controls():
    titles = [f"temperature {it}, by blocks" for it in ("0.7", "1")]
    gains = {
        rule: [row[title][0] for title in titles]
        for _, rule, row in figures.cells("controls")
        if rule != "strict" and all(row[title] for title in titles)
    }
    ours = gains.pop("a price")
    assert len(gains) == 7
    for heat in ("temperature 0.7", "temperature 1"):
        for how, most in (("position by position", 1.5), ("by blocks", 2)):
            own, *others = (
                found("controls", "", rule, f"{heat}, {how}")[0]
                for rule in ("a price", "mentored decoding", "lenience")
            )
            assert all(0.5 < 100 * (own - it) < most for it in others)
    for rule, own in gains.items():
        assert all(np.greater(ours, own)), rule
        assert not rule.startswith("strict") or max(own) < 1.03, rule
    for _, heat, row in figures.cells("controls-halves"):
        whole, half = row["0.02, all prompts"][0], row["other half"][0]
        assert abs(whole - half) <= 0.006, heat
    for heading, at, row in figures.cells("controls-k"):
        is_large = heading.startswith("Llama")
        assert (row["MARS / lossless"][1] > 1) == is_large, at


def test_what_is_said_of_text():
    """Of the table of what a bound does to text."""
    for begin in (figures.ALL, "**length", *figures.POOLED):
        _, low, high = effect(begin, 2)
        assert low <= float(begin == "**length") <= high, "at 0.02 no difference"
    assert effect(figures.ALL, 3)[2] < 0, "fewer end at 0.05"
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in figures.effects("all")]
    again = {row[0]: row for row in table[-6:]}
    assert all("to +" in again[heat][2] and "(-" in again[heat][2] for heat in figures.POOLED)
    more = [heat for heat in figures.POOLED if "(+" in again[heat][3]]
    assert more == ["greedy", "temperature 0.7"], "repeats itself more at 0.05"
    assert effect("**NLL", 2)[1] > 0, "less probable"
    cells = [
        row["mean weight of a token"]
        for name in ("reading", "reading8", "exact", "ends")
        for _, rule, row in figures.cells(name)
        if rule.startswith("mars_max_loss") and row["mean weight of a token"] is not None
    ]
    beyond = [abs(value - 1) for value, low, high in cells if not low <= 1 <= high]
    assert (len(cells), len(beyond)) == (29, 3) and max(beyond) < 0.0025
