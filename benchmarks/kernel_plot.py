"""The picture of a `benchmarks.kernel` run: bandwidth over the size of the logits, and latency."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

# Colour and marker of each variant that is drawn, the same in both panels; dark to light on paper.
STYLES = {
    "mars": ("#0072b2", "o"),
    "vLLM V2, strict": ("#d55e00", "s"),
    "vLLM V1, strict": ("#009e73", "^"),
    "torch topk(2), whole rule": ("#888888", "x"),
}
# Up to here launches and latency count for more than bandwidth.
SMALL_BYTES = 20e6


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws a result as a PNG.

    Args:
        result: what `benchmarks.kernel` wrote.
        path: the file to write.
    """
    figure, (rate, latency) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    small = min(cell["logits_bytes"] for cell in result["cells"])
    for name, (color, marker) in STYLES.items():
        points = sorted(
            (cell["logits_bytes"] / 1e6, variant["gb_per_s"], _median(variant))
            for cell in result["cells"]
            if "skipped" not in (variant := cell["variants"][name])
        )
        if not points:
            continue
        style = {"color": color, "marker": marker, "linestyle": "none", "label": name}
        rate.plot([p[0] for p in points], [p[1] for p in points], **style)
        few = [p for p in points if p[0] * 1e6 <= max(SMALL_BYTES, small)]
        latency.plot([p[0] for p in few], [p[2] for p in few], **style)
    bandwidth = result["bandwidth"]["best_gb_per_s"]
    rate.axhline(bandwidth, color="black", linewidth=1)
    rate.annotate(
        f"measured bandwidth, {bandwidth:,.0f} GB/s",
        (0.02, bandwidth),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
    )
    rate.set(xscale="log", xlabel="logits, MB", ylabel="GB/s, logits read once", ylim=(0, None))
    latency.set(
        xscale="log", yscale="log", xlabel="logits, MB (small steps)", ylabel="median, microseconds"
    )
    for axes in (rate, latency):
        axes.grid(alpha=0.3)
    latency.legend(frameon=False)
    figure.suptitle(f"One greedy verification step, {result['device']['name']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _median(variant: dict[str, Any]) -> float:
    """Microseconds under a graph, or without one where there is none."""
    median: float = (variant["graph"] or variant["eager"])["median"]
    return median
