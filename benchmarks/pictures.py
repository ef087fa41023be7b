"""Draws the pictures of the pages, as SVG: a step, the time of steps, and the price in an answer.

    make figures        # a test compares

Their numbers stand on the pages that show them, or beside their raw files, and are read from there.
A picture has a ground of its own, light or dark as the reader's system has it, and is as wide as a
phone.
"""

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from vllm_mars.kernels.rule import Allowance
from vllm_mars.kernels.terms import FOLLOWS, GREEDY_SCALE, LOSS_BITS, loss_rate, most_lost

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STEP = ROOT / "benchmarks/results/step.json"
WIDTH = 440
MARGIN = 16
# Light and dark: ground and its edge, text, what matters less, what is kept, what is thrown away,
# what costs something, and three kinds of bars.
COLOURS = {
    "ground": ("#ffffff", "#0d1117"),
    "edge": ("#d0d7de", "#3d444d"),
    "text": ("#1f2328", "#f0f6fc"),
    "quiet": ("#59636e", "#9198a1"),
    "good": ("#1a7f37", "#3fb950"),
    "bad": ("#cf222e", "#f85149"),
    "paid": ("#9a6700", "#d29922"),
    "bar0": ("#afb8c1", "#656c76"),
    "bar1": ("#54aeff", "#388bfd"),
    "bar2": ("#4ac26b", "#2ea043"),
}
BOUND = 0.02
TOKENS = 48


class Picture:
    """An SVG of a given height, to which shapes and lines of text are added."""

    def __init__(self, height: float, told: str) -> None:
        """Starts with the ground; `told` is the picture in words, for who cannot see it."""
        light, dark = (
            "".join(
                f".f-{name}{{fill:{pair[at]}}}.s-{name}{{stroke:{pair[at]}}}"
                for name, pair in COLOURS.items()
            )
            for at in (0, 1)
        )
        self.height = height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
            f'viewBox="0 0 {WIDTH} {height:g}" role="img" '
            'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="15">',
            f"<title>{escape(told)}</title>",
            f"<style>text{{white-space:pre}}{light}"
            f"@media (prefers-color-scheme: dark){{{dark}}}</style>",
        ]
        self.box(0.5, 0.5, WIDTH - 1, height - 1, "ground", edge="edge", radius=8)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        colour: str = "text",
        *,
        size: float = 15,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text at its baseline."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="f-{colour}" font-size="{size:g}" '
            f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str,
        *,
        edge: str = "",
        radius: float = 2,
    ) -> None:
        """A filled rectangle."""
        lined = f" s-{edge}" if edge else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="{radius:g}" '
            f'class="f-{colour}{lined}"/>'
        )

    def line(
        self, points: Iterable[Sequence[float]], colour: str, *, width: float = 2, dash: str = ""
    ) -> None:
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" class="s-{colour}" fill="none" '
            f'stroke-width="{width:g}"{dashed}/>'
        )

    def __str__(self) -> str:
        return "\n".join((*self.parts, "</svg>", ""))


def step() -> Picture:
    """A step of a real answer, verified strictly and by MARS, with the target's probabilities."""
    found = json.loads(STEP.read_text(encoding="utf-8"))
    rows, gap = found["draft"], 10
    width = (WIDTH - 2 * MARGIN - gap * (len(rows) - 1)) / len(rows)
    picture = Picture(430, found["told"])

    def cells(y: float, named: Sequence[tuple[str, str, str]]) -> None:
        """Tokens beside each other, each with what is said of it and a colour."""
        for at, (token, said, colour) in enumerate(named):
            x = MARGIN + at * (width + gap)
            picture.box(x, y, width, 48, "ground", edge=colour, radius=6)
            name = "text" if colour == "edge" else colour
            picture.text(x + width / 2, y + 21, token, name, size=16, anchor="middle", bold=True)
            picture.text(x + width / 2, y + 39, said, "quiet", size=14, anchor="middle")

    picture.text(MARGIN, 30, f"… {found['before']}", size=16)
    picture.text(MARGIN, 62, "The draft proposes", bold=True)
    picture.text(WIDTH - MARGIN, 62, "probability by the target", "quiet", size=14, anchor="end")
    cells(72, [(row["token"], f"{row['p']:.2f}", "edge") for row in rows])
    picture.text(MARGIN, 146, "The target would say", bold=True)
    cells(156, [(row["first"], f"{row['first_p']:.2f}", "edge") for row in rows])

    accepted = {"strict": 0, "mars": len(found["mars"]) - 1}
    for y, rule, title in ((234, "strict", "Strict"), (324, "mars", "MARS")):
        tokens = found[rule]
        count = "1 token" if len(tokens) == 1 else f"{len(tokens)} tokens"
        cost = f", for {found['nats']:.2f} nats" if rule == "mars" else ""
        picture.text(MARGIN, y, f"{title}: {count} in this step{cost}", bold=True)
        cells(
            y + 10,
            [
                (token, "draft, accepted", "paid")
                if at < accepted[rule]
                else (token, "the target's own", "good")
                for at, token in enumerate(tokens)
            ],
        )
    picture.text(MARGIN, 414, "A real step of the packaged model.", "quiet", size=14)
    return picture


def step_time() -> Picture:
    """The table of docs/one-gpu.md as bars."""
    page = (DOCS / "one-gpu.md").read_text(encoding="utf-8")
    table = page.split("<!-- picture: step_time -->\n")[1].split("\n\n")[0].splitlines()
    titles, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    names, most = titles[1:], max(float(cell) for row in rows for cell in row[1:])
    picture = Picture(70 + 76 * len(rows), "Milliseconds of a step, by rule, temperature and load")
    x = float(MARGIN)
    for at, name in enumerate(names):
        picture.box(x, 20, 13, 13, f"bar{at}")
        picture.text(x + 19, 32, name, size=14)
        x += 34 + 7.1 * len(name)
    for at, row in enumerate(rows):
        y = 64.0 + 76 * at
        picture.text(MARGIN, y, row[0], bold=True)
        for bar, cell in enumerate(row[1:]):
            length = (WIDTH - 2 * MARGIN - 70) * float(cell) / most
            picture.box(MARGIN, y + 8 + 18 * bar, length, 14, f"bar{bar}")
            picture.text(MARGIN + length + 6, y + 20 + 18 * bar, f"{cell} ms", size=14)
    return picture


def price() -> Picture:
    """What an answer may lose, has lost, and pays for a token, after each of its tokens."""
    page = (DOCS / "requests.md").read_text(encoding="utf-8")

    def told(key: str) -> list[float]:
        values: list[float] = json.loads(re.findall(rf'"{key}": (\[[^]]*\])', page)[0])
        return values

    rate, unit = loss_rate(BOUND), 2.0**-LOSS_BITS
    losses = dict(zip(told("relaxed_positions"), told("loss_nats"), strict=True))
    lost: list[float] = [0]
    for at in range(TOKENS):
        lost.append(lost[-1] + losses.get(at, 0.0))
    prices = [
        unit * Allowance.of(FOLLOWS, rate, round(nats / unit), at, 1 << 20, GREEDY_SCALE).price
        for at, nats in enumerate(lost)
    ]
    allowed = [unit * most_lost(rate, at) for at in range(TOKENS + 1)]
    picture = Picture(446, "The price falls where an answer spends, and recovers while it does not")

    def panel(y: float, height: float, most: float, ticks: Sequence[float]) -> Any:
        left, right = MARGIN + 34, WIDTH - MARGIN
        for tick in ticks:
            at = y + height * (1 - tick / most)
            picture.line([(left, at), (right, at)], "edge", width=1)
            picture.text(left - 8, at + 5, f"{tick:g}", "quiet", size=14, anchor="end")

        def place(values: Sequence[float]) -> list[tuple[float, float]]:
            return [
                (left + (right - left) * at / TOKENS, y + height * (1 - value / most))
                for at, value in enumerate(values)
            ]

        return place

    picture.text(MARGIN, 28, "nats that the answer may lose", "good", bold=True)
    picture.text(MARGIN, 48, "nats that it has lost", "bad", bold=True)
    place = panel(64, 130, 3.2, (0, 1, 2, 3))
    picture.line(place(allowed), "good")
    steps = [(x, y) for pair in zip(place(lost), place([*lost[1:], lost[-1]]), strict=True)
             for x, y in (pair[0], (pair[0][0], pair[1][1]))]  # fmt: skip
    picture.line(steps, "bad")
    picture.text(MARGIN, 238, "price: nats that one more token may cost", "paid", bold=True)
    place = panel(252, 130, 0.5, (0, 0.1, 0.2, 0.3, 0.4, 0.5))
    picture.line(place(prices), "paid")
    for at in range(0, TOKENS + 1, 12):
        x = MARGIN + 34 + (WIDTH - 2 * MARGIN - 34) * at / TOKENS
        anchor = "end" if at == TOKENS else "middle"
        picture.text(x, 404, str(at), "quiet", size=14, anchor=anchor)
    picture.text(WIDTH / 2, 428, "tokens of the answer", "quiet", size=14, anchor="middle")
    return picture


PICTURES = {"step.svg": step, "step_time.svg": step_time, "price.svg": price}


def main() -> None:
    """Writes each picture."""
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
