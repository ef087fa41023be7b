"""The report's plots, drawn by matplotlib: SVG that follows the page's colours, and PNG.

An SVG is drawn in stand-in colours, which become CSS variables of the page, so that one drawing
serves light and dark.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# A phone of 390 pixels shows it at about its own size.
SIZE = (4.8, 3.4)
DPI = 200
# Characters that fit into a line above the axes.
TITLE_WIDTH = 60
SERIES = 8
LEGEND_COLUMNS, LEGEND_ROW = 2, 0.19
MARKERS = "osD^vPX*"
LINE_STYLES = ("--", "-", ":", "-.")

_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Palette:
    """Colours of a drawing: `ink`, `grid`, `paper`, and those of the series."""

    ink: str
    grid: str
    paper: str
    series: tuple[str, ...]


# Okabe and Ito's colours for all kinds of sight, the yellow darkened for a light page.
LIGHT = Palette(
    "#1c1c1c",
    "#d9d9d9",
    "#ffffff",
    ("#0072b2", "#d55e00", "#009e73", "#a8548a", "#8a6d00", "#3a8fc4", "#8c8c8c", "#b03060"),
)
# Stand-ins that occur nowhere else, and the CSS variables they become.
_VARIABLES = {
    "#010203": "--ink",
    "#010204": "--grid",
    "#010205": "--paper",
    **{f"#01030{i}": f"--series-{i}" for i in range(SERIES)},
}
_STAND_IN = Palette("#010203", "#010204", "#010205", tuple(f"#01030{i}" for i in range(SERIES)))

Draw = Callable[[Axes, Palette], None]


@dataclass(frozen=True)
class Plot:
    """A plot of the report.

    Attributes:
        name: of its file, and the prefix of its ids in the page.
        title: in one line.
        note: what one sees, or must know.
        draw: draws it.
        named: series that a legend below the axes names.
    """

    name: str
    title: str
    note: str
    draw: Draw
    named: int = 0

    def svg(self) -> str:
        """The drawing as an `<svg>` element without size, in the page's colours."""
        buffer = io.StringIO()
        with rc_context(_style(_STAND_IN, **{"svg.hashsalt": self.name})):
            figure = self._figure(_STAND_IN)
            canvas: Any = FigureCanvasSVG(figure)
            canvas.print_svg(buffer, metadata={"Date": None, "Creator": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        for stand_in, variable in _VARIABLES.items():
            text = text.replace(stand_in, f"var({variable})")
        # The page has the font; matplotlib names its own.
        text = re.sub(r"font-family: [^;\"]*; ?", "", text)
        # Ids are of one document, and all plots share the page.
        text = re.sub(r'\bid="', f'id="{self.name}-', text)
        text = re.sub(r'(href="#|url\(#)', rf"\1{self.name}-", text)
        # Without a size of its own it takes the width that the page gives it.
        text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
        return text.replace("<svg", f'<svg role="img" aria-label="{_attribute(self.title)}"', 1)

    def png(self, path: Path) -> None:
        """Writes the drawing, on white, as a PNG file."""
        with rc_context(_style(LIGHT)):
            figure = self._figure(LIGHT)
            figure.axes[0].set_title(textwrap.fill(self.title, TITLE_WIDTH), fontsize=9)
            FigureCanvasAgg(figure)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=DPI)

    def _figure(self, palette: Palette) -> Figure:
        rows = math.ceil(self.named / LEGEND_COLUMNS)
        figure = Figure(figsize=(SIZE[0], SIZE[1] + LEGEND_ROW * rows), layout="constrained")
        self.draw(figure.add_subplot(), palette)
        if rows:
            figure.legend(loc="outside lower center", ncols=LEGEND_COLUMNS)
        return figure


@dataclass(frozen=True)
class Series:
    """Named points of a plot.

    Attributes:
        label: its name.
        x, y: the points.
        low, high: ends of an interval around each y; empty where there is none.
        colour: index of its colour; by default its place among the series.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int | None = None


def lines(series: Sequence[Series], x_label: str, y_label: str, *, log2: bool = False) -> Draw:
    """Draws series as lines with markers."""

    def draw(axes: Axes, palette: Palette) -> None:
        for index, item in enumerate(series):
            colour = _colour(palette, item, index)
            axes.plot(item.x, item.y, marker=_marker(index), color=colour, label=item.label)
        ticks = sorted({value for item in series for value in item.x})
        if log2:
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        _label(axes, x_label, y_label)

    return draw


def pareto(series: Sequence[Series], x_label: str, y_label: str, *, higher: bool) -> Draw:
    """Draws a point for each rule, and the line of those that no other beats in both.

    Args:
        series: the rules, each a point.
        x_label: where more is better.
        y_label: quality.
        higher: whether more quality is a larger y; else the axis is turned, so that up is better.
    """

    def draw(axes: Axes, palette: Palette) -> None:
        points = [(x, y) for item in series for x, y in zip(item.x, item.y, strict=True)]
        front = frontier(points, higher=higher)
        axes.plot(*zip(*front, strict=True), color=palette.grid, linewidth=4, zorder=1)
        for index, item in enumerate(series):
            colour = _colour(palette, item, index)
            for place, (x, y) in enumerate(zip(item.x, item.y, strict=True)):
                if item.low:
                    error = [[y - item.low[place]], [item.high[place] - y]]
                    axes.errorbar(x, y, error, color=colour, alpha=0.5, linewidth=1)
            axes.plot(
                item.x, item.y, marker=_marker(index), color=colour, linestyle="", label=item.label
            )
        if not higher:
            axes.invert_yaxis()
        axes.margins(x=0.1, y=0.1)
        _label(axes, x_label, y_label)

    return draw


def frontier(points: Sequence[tuple[float, float]], *, higher: bool) -> list[tuple[float, float]]:
    """The points that no other one beats or equals in both, by rising x.

    Args:
        points: (speed, quality).
        higher: whether more quality is a larger y.
    """
    sign = 1 if higher else -1
    found: list[tuple[float, float]] = []
    for x, y in sorted(set(points), key=lambda point: (-point[0], -sign * point[1])):
        if not found or sign * y > sign * found[-1][1]:
            found.append((x, y))
    return found[::-1]


def bars(groups: Sequence[str], series: Sequence[Series], y_label: str) -> Draw:
    """Draws groups of bars; each series has one y for each group, NaN where it has none."""

    def draw(axes: Axes, palette: Palette) -> None:
        width = 0.8 / len(series)
        for index, item in enumerate(series):
            places = [group - 0.4 + width * (index + 0.5) for group in range(len(groups))]
            drawn = axes.bar(places, item.y, width * 0.9, color=_colour(palette, item, index))
            axes.bar_label(drawn, [_short(value) for value in item.y], fontsize=7.5, padding=1)
            drawn.set_label(item.label)
        axes.set_xticks(range(len(groups)), groups)
        axes.grid(False, axis="x")
        _label(axes, "", y_label)
        axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))

    return draw


def histogram(
    edges: Sequence[float],
    series: Sequence[Series],
    marks: Sequence[tuple[float, str]],
    x_label: str,
    y_label: str,
) -> Draw:
    """Draws counts over the same bins, in front of each other, and marked places."""

    def draw(axes: Axes, palette: Palette) -> None:
        widths = [high - low for low, high in zip(edges[:-1], edges[1:], strict=True)]
        for index, item in enumerate(series):
            axes.bar(
                edges[:-1],
                item.y,
                widths,
                align="edge",
                color=_colour(palette, item, index),
                label=item.label,
            )
        for place, (value, label) in enumerate(marks):
            style = LINE_STYLES[place % len(LINE_STYLES)]
            axes.axvline(value, color=palette.ink, linewidth=1.4, linestyle=style, label=label)
        first = next((edge for edge, count in zip(edges, series[0].y, strict=False) if count), 0)
        axes.set_xlim(first, edges[-1])
        axes.grid(False, axis="x")
        _label(axes, x_label, y_label)
        axes.legend(loc="upper left")

    return draw


def curve(
    predicted: Series,
    measured: Series,
    budget: float | None,
    marks: Sequence[tuple[float, str]],
    x_label: str,
    y_label: str,
) -> Draw:
    """Draws a predicted curve with its upper bound, measured points and the budget, if any."""

    def draw(axes: Axes, palette: Palette) -> None:
        axes.plot(predicted.x, predicted.y, color=palette.series[0], label=predicted.label)
        axes.fill_between(
            predicted.x, predicted.y, predicted.high, color=palette.series[0], alpha=0.25
        )
        if budget is not None:
            axes.axhline(budget, color=palette.ink, linewidth=1, linestyle=(0, (4, 2)))
            axes.annotate("budget", (0, budget), (4, 2), xycoords=("axes fraction", "data"),
                          textcoords="offset points", fontsize=8)  # fmt: skip
        if measured.x:
            error = [
                [y - low for y, low in zip(measured.y, measured.low, strict=True)],
                [high - y for y, high in zip(measured.y, measured.high, strict=True)],
            ]
            axes.errorbar(measured.x, measured.y, error, color=palette.series[1], marker="D",
                          linestyle="none", label=measured.label, zorder=3)  # fmt: skip
        for value, label in marks:
            axes.axvline(value, color=palette.ink, linewidth=1, linestyle=":", label=label)
        _label(axes, x_label, y_label)
        axes.legend()

    return draw


def _colour(palette: Palette, series: Series, index: int) -> str:
    chosen = index if series.colour is None else series.colour
    return palette.series[chosen % SERIES]


def _marker(index: int) -> str:
    # Another pairing with the colours in each round.
    return MARKERS[(index + index // SERIES) % len(MARKERS)]


def _short(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)


def _style(palette: Palette, **more: object) -> Any:
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        **_STYLE,
        **dict.fromkeys(names, palette.ink),
        "grid.color": palette.grid,
        "figure.facecolor": "none" if palette is _STAND_IN else palette.paper,
        "axes.facecolor": "none",
        **more,
    }


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
