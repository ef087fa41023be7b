"""One self-contained HTML page of a sweep: what to set, a chart, a table."""

import io
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mars import __version__
from vllm_mars.experiments.plan import family
from vllm_mars.experiments.records import SweepFile, read_sweep
from vllm_mars.experiments.rows import Row, Text, points, rows, shown, tables
from vllm_mars.local.drafts import RECOMMENDED
from vllm_mars.local.result_file import require_writable

# Of the recommended setting, whose answers spend their bound and a part of the burst.
MAX_LOSS: float = 1.25 * RECOMMENDED["mars_max_loss"]
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#595959", "#e69f00")
CANNOT_TELL = "no rule is recommended"


@dataclass(frozen=True)
class Advice:
    """What to set at one temperature and load.

    Attributes:
        setting: JSON for `--speculative-config`, or `CANNOT_TELL`.
        row: what was chosen.
    """

    point: str
    setting: str
    why: str
    row: Row | None = None


def advise(group: Sequence[Row], baseline: str, max_loss: float) -> Advice:
    """Recommends the fastest lossy rule of one temperature and load that is faster and good enough.

    Both by the ends of 95 % intervals: the speed above the baseline's, the loss at most `max_loss`.
    """
    first = group[0].cell
    point = "Greedy" if first.temperature == 0 else f"At temperature {first.temperature:g}"
    point += f", {first.concurrency} at a time" if first.concurrency > 1 else ""
    lossy = [row for row in group if row.cell.is_lossy and row.lost and row.speed]
    if not any(row.cell.name == baseline and row.answers for row in group) or not lossy:
        why = f"No lossy rule was measured beside {baseline}."
        return Advice(point, CANNOT_TELL, why)
    good = [row for row in lossy if row.lost and row.lost.high <= max_loss]
    faster = [row for row in good if (of := row.speed) and of.low > 1]
    if not faster:
        why = f"Of {len(lossy)} lossy rules, {len(good)} lose at most {max_loss:g} nats per token, "
        why += f"and none of these is significantly faster than {baseline}."
        return Advice(point, CANNOT_TELL, why)
    best = max(faster, key=lambda row: (row.speed or (0.0,))[0])
    why = (
        f"{best.cell.name}: {shown(best.speed, '.2f')} x {baseline}, "
        f"{shown(best.lost, '.4f')} nats lost per token, the fastest of {len(good)} rules (of "
        f"{len(lossy)} lossy ones) that lose at most {max_loss:g}. "
        "Picked from several, it looks a little faster than it is."
    )
    return Advice(point, json.dumps(best.cell.config), why, best)


def draw(axes: Any, group: Sequence[Row], title: str, baseline: str) -> None:
    """Draws speed by loss; rules that differ in a value alone are joined."""
    families: dict[str, list[Row]] = {}
    for row in group:
        if row.lost and row.speed:
            families.setdefault(family(row.cell.config)[0], []).append(row)
    most = max(lost.value for own in families.values() for row in own if (lost := row.lost))
    for number, own in enumerate(families.values()):
        color = COLORS[number % len(COLORS)]
        own.sort(key=lambda row: row.lost or (0.0,))
        x = [row.lost.value for row in own if row.lost]
        y = [row.speed.value for row in own if row.speed]
        axes.plot(x, y, "-o", color=color, markersize=4)
        for row in own:
            lost, speed = row.lost, row.speed
            assert lost and speed, "only such rows are drawn"
            axes.vlines(lost.value, speed.low, speed.high, color=color, alpha=0.4)
            is_left = lost.value <= most / 2
            axes.annotate(
                row.cell.name,
                (lost.value, speed.value),
                (5 if is_left else -5, 4),
                ha="left" if is_left else "right",
                textcoords="offset points",
                color=color,
                fontsize="small",
            )
    axes.axhline(1, color="black", linewidth=1)
    axes.margins(x=0.25, y=0.15)
    axes.set(title=title, xlabel="nats lost per token", ylabel=f"speed x {baseline}")
    axes.grid(alpha=0.3)


def chart(panels: Mapping[str, Sequence[Row]], baseline: str) -> str:
    """An SVG element with a panel for each temperature and load; its text stays text."""
    import matplotlib
    from matplotlib.figure import Figure

    across = min(2, len(panels))
    down = -(-len(panels) // across)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 11}):
        figure = Figure(figsize=(5 * across, 3.8 * down), layout="constrained")
        places = list(figure.subplots(down, across, squeeze=False).flat)
        for axes, (title, group) in zip(places, panels.items(), strict=False):
            draw(axes, group, title, baseline)
        for axes in places[len(panels) :]:
            axes.remove()
        drawn = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(drawn, format="svg", metadata=nothing)
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def write_report(path: Path, output: Path, max_loss: float = MAX_LOSS) -> None:
    """Writes the page of a sweep.

    Raises:
        ValueError: the file cannot be read.
        RuntimeError: the page cannot be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    file = read_sweep(path)
    baseline = file.heads[-1].baseline
    found = rows(file)
    groups = points(found)
    advice = [advise(group, baseline, max_loss) for group in groups]
    drawable = {
        of.point: group
        for group, of in zip(groups, advice, strict=True)
        if any(row.lost and row.speed for row in group)
    }
    environment = Environment(
        loader=PackageLoader("vllm_mars.experiments", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("report.html.j2").render(
        name=path.name,
        version=__version__,
        advice=advice,
        chart=chart(drawable, baseline) if drawable else "",
        tables=tables(found, baseline),
        examples=[row for row in found if row.example],
        runs=_runs(file),
    )
    require_writable(output)
    output.write_text(text, encoding="utf-8")


def _runs(file: SweepFile) -> Text:
    """What was run, and what failed."""
    body = []
    for head in file.heads:
        run = head.run
        what = [f"{name} {value}" for name, value in run["versions"].items() if value]
        machine = [f"{name} {value}" for name, value in run["hardware"].items() if value]
        body.append([run["created"], run["git_commit"] or "", ", ".join(what), ", ".join(machine)])
        body[-1].append(shlex.join(run["command"]))
    failed = {f"{it.name}: {it.reason.splitlines()[0]}" for it in file.records if not it.measured}
    body += [["failed", "", "", "", reason] for reason in sorted(failed)]
    return Text("What was run", ["when", "commit", "versions", "hardware", "command"], body)
