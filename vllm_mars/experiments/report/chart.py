"""Charts as the template draws them: in per cent of the plot, so that they fit any width."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_mars.experiments.report.measured import Interval

# x, y and a label.
ChartPoint = tuple[Interval, Interval, str]


@dataclass(frozen=True)
class Curve:
    """Named points, joined in their order or not."""

    name: str
    points: Sequence[ChartPoint]
    joined: bool = True


@dataclass(frozen=True)
class Chart:
    """Curves in a plot; `level` is a y that is marked across it, and its name."""

    x_name: str
    y_name: str
    curves: Sequence[Curve]
    level: tuple[float, str] | None = None

    @cached_property
    def _ends(self) -> list[tuple[float, float]]:
        """Lowest and highest value of each axis, with some room."""
        points = [(x, y) for curve in self.curves for x, y, _ in curve.points]
        ends = []
        for axis, marked in enumerate(([], [self.level[0]] if self.level else [])):
            values = [*(end for point in points for end in point[axis]), *marked]
            room = 0.06 * (max(values) - min(values) or 1)
            ends.append((min(values) - room, max(values) + room))
        return ends

    def at(self, axis: int, value: float) -> float:
        """Where a value is: per cent from the left for axis 0, from the top for axis 1."""
        low, high = self._ends[axis]
        share = (value - low) / (high - low)
        return round(100 * (1 - share if axis else share), 2)

    def ticks(self, axis: int) -> list[tuple[float, str]]:
        """Where an axis has round values, and the values."""
        low, high = self._ends[axis]
        least = (high - low) / 5
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * times for times in (1, 2, 5, 10) if power * times >= least)
        whole = range(math.ceil(low / step), math.floor(high / step) + 1)
        return [(self.at(axis, index * step), f"{index * step:.6g}") for index in whole]
