"""Draws the SVG pictures of the pages: a step, the gain of bounds by their cost, and theta.

    make figures        # a test compares

Pictures have a light or dark background, as the reader's system, and the width of a phone.
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from benchmarks import figures

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STEP = ROOT / "benchmarks/results/step.json"
WIDTH = 440
MARGIN = 16
# Light and dark colours; good, bad and paid are for accepted, rejected and lossy.
COLOURS = {
    "ground": ("#ffffff", "#0d1117"),
    "edge": ("#d0d7de", "#3d444d"),
    "text": ("#1f2328", "#f0f6fc"),
    "quiet": ("#59636e", "#9198a1"),
    "good": ("#1a7f37", "#3fb950"),
    "bad": ("#cf222e", "#f85149"),
    "paid": ("#9a6700", "#d29922"),
}
# Lines of the picture of gains: heading in benchmarks/results/states.json to name and colour.
LINES = {
    "temperature 1": ("temperature 1", "good"),
    "temperature 0.7": ("temperature 0.7", "paid"),
    "temperature 0.4": ("temperature 0.4", "quiet"),
    "greedy": ("greedy", "text"),
}
RIGHT = "right less strict's, points"
# Lines of the picture of theta: task in benchmarks/results/pair.json to name and colour.
TASKS = {"gsm8k": ("GSM8K", "good"), "humaneval": ("HumanEval", "paid")}


class Picture:
    """An SVG of a given height, with a title for screen readers."""

    def __init__(self, height: float, title: str) -> None:
        light, dark = (
            "".join(
                f".f-{name}{{fill:{pair[theme]}}}.s-{name}{{stroke:{pair[theme]}}}"
                for name, pair in COLOURS.items()
            )
            for theme in (0, 1)
        )
        self.height = height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
            f'viewBox="0 0 {WIDTH} {height:g}" role="img" '
            'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="15">',
            f"<title>{escape(title)}</title>",
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
        """Adds a line of text; y is its baseline."""
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
        lined = f" s-{edge}" if edge else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="{radius:g}" '
            f'class="f-{colour}{lined}"/>'
        )

    def dot(self, x: float, y: float, colour: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="f-{colour}"/>')

    def line(
        self, points: Iterable[Sequence[float]], colour: str, *, width: float = 2, dash: str = ""
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" class="s-{colour}" fill="none" '
            f'stroke-width="{width:g}"{dashed}/>'
        )

    def __str__(self) -> str:
        return "\n".join((*self.parts, "</svg>", ""))


def step() -> Picture:
    """Draws a real step, verified strictly and by MARS."""
    content = json.loads(STEP.read_text(encoding="utf-8"))
    rows, gap = content["draft"], 10
    width = (WIDTH - 2 * MARGIN - gap * (len(rows) - 1)) / len(rows)
    picture = Picture(430, content["told"])

    def cells(y: float, named: Sequence[tuple[str, str, str]]) -> None:
        """Draws a row of tokens with captions and colours."""
        for index, (token, caption, colour) in enumerate(named):
            x = MARGIN + index * (width + gap)
            picture.box(x, y, width, 48, "ground", edge=colour, radius=6)
            name = "text" if colour == "edge" else colour
            picture.text(x + width / 2, y + 21, token, name, size=16, anchor="middle", bold=True)
            picture.text(x + width / 2, y + 39, caption, "quiet", size=14, anchor="middle")

    picture.text(MARGIN, 30, f"… {content['before']}", size=16)
    picture.text(MARGIN, 62, "The draft proposes", bold=True)
    picture.text(WIDTH - MARGIN, 62, "probability by the target", "quiet", size=14, anchor="end")
    cells(72, [(row["token"], f"{row['p']:.2f}", "edge") for row in rows])
    picture.text(MARGIN, 146, "The target's choice there", bold=True)
    cells(156, [(row["first"], f"{row['first_p']:.2f}", "edge") for row in rows])

    accepted = {"strict": 0, "mars": len(content["mars"]) - 1}
    for y, rule, title in ((234, "strict", "Strict"), (324, "mars", "MARS")):
        tokens = content[rule]
        count = "1 token" if len(tokens) == 1 else f"{len(tokens)} tokens"
        cost = f", for {content['nats']:.2f} nats" if rule == "mars" else ""
        picture.text(MARGIN, y, f"{title}: {count} in this step{cost}", bold=True)
        cells(
            y + 10,
            [
                (token, "draft, accepted", "paid")
                if index < accepted[rule]
                else (token, "the target's own", "good")
                for index, token in enumerate(tokens)
            ],
        )
    rejected = " ".join(row["token"] for row in rows)
    picture.text(2 * MARGIN + width, 272, f"rejected: {rejected}", "bad", size=14)
    picture.text(MARGIN, 414, "A real step of the packaged model.", "quiet", size=14)
    return picture


def gains() -> Picture:
    """Draws the gain of bounds over the best lossless setting, by nats lost."""
    picture = Picture(402, "What bounds of 0.005, 0.02 and 0.05 gain, by nats lost per token")
    left, right = MARGIN + 42, WIDTH - MARGIN
    top, bottom = 118, 340
    max_nats, max_percent = 0.06, 25
    picture.text(MARGIN, 28, "more tokens per step than lossless", bold=True)
    picture.text(MARGIN, 95, "each line: bounds of 0.005, 0.02 and 0.05", "quiet", size=14)
    for index, (name, colour) in enumerate(LINES.values()):
        x, y = MARGIN + 6.0 + 150 * (index % 2), 46.0 + 22 * (index // 2)
        picture.dot(x, y, colour)
        picture.text(x + 13, y + 5, name, size=14)

    def place(nats: float, gain: float) -> tuple[float, float]:
        share = 100 * (gain - 1) / max_percent
        return left + (right - left) * nats / max_nats, bottom - (bottom - top) * share

    for percent in range(0, max_percent + 1, 5):
        _, y = place(0, 1 + percent / 100)
        picture.line([(left, y), (right, y)], "edge", width=1)
        picture.text(left - 8, y + 5, f"{percent}%", "quiet", size=14, anchor="end")
    for tick in (0.0, 0.02, 0.04, 0.06):
        anchor = "end" if tick == max_nats else "middle"
        x, _ = place(tick, 1)
        picture.text(x, bottom + 22, f"{tick:g}", "quiet", size=14, anchor=anchor)
    for begin, (_, colour) in LINES.items():
        rows = [
            (row["nats per token"][0], row["x strict"])
            for heading, rule, row in figures.cells("states")
            if heading.startswith(f"{begin},") and rule.startswith("bound")
            if heading.endswith("K 4") and "fixed" not in heading
        ]
        picture.line([place(0, 1), *(place(nats, gain[0]) for nats, gain in rows)], colour)
        for nats, (gain, *ends) in rows:
            picture.line([place(nats, end) for end in ends], colour, width=1.5)
            picture.dot(*place(nats, gain), colour)
    picture.text(WIDTH / 2, 386, "nats lost per token", "quiet", size=14, anchor="middle")
    return picture


def theta() -> Picture:
    """Draws tokens per step and right answers by theta, relative to strict verification."""
    picture = Picture(470, "Tokens per step and right answers by theta, relative to strict")
    left, right = MARGIN + 48, WIDTH - MARGIN - 14
    least = 0.84

    def x_of(value: float) -> float:
        return left + (right - left) * (1 - value) / (1 - least)

    panels = (
        ("more tokens per step", 66, 200, (0, 30), (0, 10, 20, 30), "tokens per step x strict"),
        ("right answers, points", 256, 410, (-40, 20), (-40, -20, 0, 20), RIGHT),
    )
    for title, top, bottom, (low, high), ticks, column in panels:

        def y_of(
            value: float, top: int = top, bottom: int = bottom, low: int = low, high: int = high
        ) -> float:
            return bottom - (bottom - top) * (value - low) / (high - low)

        picture.text(MARGIN, top - 20, title, bold=True)
        for tick in ticks:
            picture.line([(left, y_of(tick)), (right, y_of(tick))], "edge", width=1)
            sign = "−" if tick < 0 else "+" if tick else ""
            unit = "%" if column != RIGHT else ""
            picture.text(
                left - 8, y_of(tick) + 5, f"{sign}{abs(tick)}{unit}", "quiet", size=14, anchor="end"
            )
        for offset, (task, (_, colour)) in zip((-2.5, 2.5), TASKS.items(), strict=True):
            rows = [
                (float(rule.split()[1]), row[column])
                for heading, rule, row in figures.cells("pair")
                if heading.startswith(f"{task}, greedy") and rule.startswith("mars_theta")
            ]
            points = [(x_of(1), y_of(0))]
            for value, cell in sorted(rows, reverse=True):
                x = x_of(value) + offset
                # Without an interval if no answer differs.
                interval = cell if isinstance(cell, list) else [cell]
                y, *ends = (y_of(v if column == RIGHT else 100 * (v - 1)) for v in interval)
                points.append((x, y))
                picture.line([(x, end) for end in ends], colour, width=1.5)
                picture.dot(x, y, colour)
            picture.line(points, colour)
    for value in (1, 0.96, 0.92, 0.88, 0.84):
        picture.text(x_of(value), 432, f"{value:g}", "quiet", size=14, anchor="middle")
    picture.text(WIDTH / 2, 456, "theta; 1 is strict", "quiet", size=14, anchor="middle")
    for index, (name, colour) in enumerate(TASKS.values()):
        x = WIDTH - MARGIN - 210 + 100 * index
        picture.dot(x, 41, colour)
        picture.text(x + 10, 46, name, size=14)
    return picture


PICTURES = {
    "step.svg": step,
    "gain.svg": gains,
    "theta.svg": theta,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
