"""Curves of rules, what each gains by what it loses, drawn by matplotlib."""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

# A metric's color, and on which side of a point its value stands, in points.
STYLES = {
    "ratio": ("#0072b2", (5, -13)),
    "gap": ("#009e73", (8, -4)),
    "price": ("#d55e00", (-8, 7)),
}
OTHER = ("#595959", (5, -13))
# Of sets of further options.
LINES = ("-", "--", ":", "-.")


class Point(NamedTuple):
    """One rule; with the ends of an interval behind a value where these are drawn, too."""

    x: Sequence[float]
    y: Sequence[float]
    text: str = ""


class Curve(NamedTuple):
    """A family of rules, the first of them strict."""

    name: str
    metric: str | None
    variant: str
    points: Sequence[Point]


class Chart(NamedTuple):
    """Curves, and the y of strict decoding, which is a line across them."""

    x_name: str
    y_name: str
    curves: Sequence[Curve]
    strict: float

    def draw(self, axes: Any) -> None:
        """Draws it into axes of matplotlib."""
        variants = list(dict.fromkeys(curve.variant for curve in self.curves))
        for curve in self.curves:
            color, side = STYLES.get(curve.metric or "", OTHER)
            line = LINES[variants.index(curve.variant) % len(LINES)]
            places = [(point.x[0], point.y[0]) for point in curve.points]
            axes.plot(*zip(*places, strict=True), line, color=color, marker="o", label=curve.name)
            for (x, *width), (y, *height), text in curve.points:
                if width:
                    axes.hlines(y, *width, color=color, alpha=0.4)
                if height:
                    axes.vlines(x, *height, color=color, alpha=0.4)
                ends = "right" if side[0] < 0 else "left"
                axes.annotate(text, (x, y), side, textcoords="offset points", color=color, ha=ends)
        axes.axhline(self.strict, color="black", linewidth=1)
        axes.set(xlabel=self.x_name, ylabel=self.y_name)
        axes.legend(frameon=False, fontsize="small", loc="upper left")
        axes.grid(alpha=0.3)

    def svg(self) -> str:
        """An SVG element for a page, whose text stays text."""
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 11}):
            figure = Figure(figsize=(6, 4.2), layout="constrained")
            self.draw(figure.subplots())
            drawn = io.StringIO()
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(drawn, format="svg", metadata=nothing)
        text = drawn.getvalue()
        return text[text.index("<svg") :]
