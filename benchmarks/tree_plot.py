"""The picture of `benchmarks.tree`: acceptance length by rows, chains and trees, rule by rule."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws what `benchmarks.tree summarise` writes as a PNG."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    curves: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in sorted(result["cells"], key=lambda cell: int(cell["rows"])):
        curves.setdefault((cell["rule"], cell["shape"].split()[0]), []).append(cell)
    colors = list(dict.fromkeys(rule for rule, _ in curves))
    for (rule, kind), cells in curves.items():
        ends = [[cell["length"][name] for cell in cells] for name in ("value", "low", "high")]
        value, low, high = np.array(ends)
        axes.errorbar(
            [cell["rows"] for cell in cells],
            value,
            (value - low, high - value),
            fmt={"chain": "o:", "tree": "^-"}[kind],
            color=f"C{colors.index(rule)}",
            label=f"{rule}, {kind}s",
            markersize=4,
            elinewidth=0.8,
        )
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
