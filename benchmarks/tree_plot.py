"""The picture of `benchmarks.tree`: acceptance length by rows, chains and trees, rule by rule."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws a result as a PNG.

    Args:
        result: what `benchmarks.tree summarise` writes.
        path: the file to write.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    rules = dict.fromkeys(cell["rule"] for cell in result["cells"])
    for color, rule in enumerate(rules):
        for kind, form in (("chain", "o:"), ("tree", "^-")):
            points = sorted(
                (cell["rows"], *(cell["length"][name] for name in ("value", "low", "high")))
                for cell in result["cells"]
                if cell["rule"] == rule and cell["shape"].startswith(kind)
            )
            if points:
                rows, values, low, high = np.array(points).T
                around = (values - low, high - values)
                style: dict[str, Any] = {
                    "label": f"{rule}, {kind}s",
                    "color": f"C{color}",
                    "markersize": 4,
                }
                axes.errorbar(rows, values, around, fmt=form, elinewidth=0.8, **style)
    axes.set(
        xscale="log",
        xlabel="rows that the target reads in a step",
        ylabel="acceptance length, tokens per step (95 %)",
    )
    ticks = [2, 3, 5, 9, 17, 33, 61]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
