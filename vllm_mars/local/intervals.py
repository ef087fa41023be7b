"""The bootstrap over prompts: what is measured of one prompt is drawn together."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
# Of an interval that leaves out 2.5 % on each side.
COVERAGE = 95


def resamples(count: int, samples: int = RESAMPLES) -> NDArray[np.int64]:
    """`[samples, count]` indices of prompts, drawn with replacement, the same each time."""
    return np.random.default_rng(0).integers(0, count, (samples, count))


def median(values: Iterable[float]) -> tuple[float, float, float]:
    """The median of one figure of each prompt, and the ends of its interval.

    Args:
        values: at least one.
    """
    figures = np.array(list(values), dtype=float)
    medians = np.median(figures[resamples(len(figures))], axis=1)
    return float(np.median(figures)), *interval(medians)


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % percentile interval of a figure of each resample."""
    outside = (100 - COVERAGE) / 2
    low, high = np.percentile(values, [outside, 100 - outside])
    return float(low), float(high)
