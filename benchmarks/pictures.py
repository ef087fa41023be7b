"""Draws the SVG pictures of the pages: a step, and the gain of bounds by their cost.

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
        picture.text(left - 8, y + 5, f"{percent} %", "quiet", size=14, anchor="end")
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


PICTURES = {
    "step.svg": step,
    "gain.svg": gains,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
