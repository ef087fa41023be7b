"""Acceptance by loss: what each metric of MARS buys at the same loss, from sweeps.

    vllm-mars sweep --prompts FOLD.jsonl FOLD.jsonl ... --output SWEEP.jsonl ...
    python -m benchmarks.frontier SWEEP.jsonl [...] --output FRONTIER.json --plot FRONTIER.png

The sweep's prompts come in several files, the folds: a server counts accepted drafts of a whole
file, not of an answer, so an interval needs files to leave out. Loss is the mean over output tokens
of log p(first choice) - log p(token), as the server counts it while it answers. A metric's
acceptance at a loss lies on the straight line between its two measured points around it; the first
point of each curve is strict decoding. Intervals are 95 % of a jackknife over folds, those of speed
of a paired bootstrap over prompts. `--speeds` is for sweeps of an idle machine, one request at a
time.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from vllm_mars.experiments.metrics import METRICS
from vllm_mars.experiments.quality.judge import mean_scores
from vllm_mars.experiments.report.chart import Chart, Curve, Point
from vllm_mars.experiments.sweep.measured import Measured, measure
from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.records import Cell, CellKey
from vllm_mars.experiments.sweep.summary import Row, rows, together
from vllm_mars.local.intervals import COVERAGE
from vllm_mars.local.result_file import write_json

# Nats per token at which metrics are compared, unless others are asked for.
LOSSES = (0.0075, 0.02, 0.03, 0.05, 0.07)
SCORES = ("repeated_4grams", "agreement", "rouge_l", "exact_match", "nll")


class Totals(NamedTuple):
    """One rule over some folds.

    Attributes:
        drafts: verification steps of single requests that had a draft.
        accepted: draft tokens that were accepted.
        tokens: output tokens.
        answers: in all passes.
        nats: what the tokens lost against the target's first choices.
    """

    drafts: int
    accepted: int
    tokens: int
    answers: int
    nats: float

    @property
    def acceptance(self) -> float:
        """Mean acceptance length as vLLM counts it, the target's own token included."""
        return 1 + self.accepted / self.drafts

    @property
    def loss(self) -> float:
        """Nats per output token."""
        return self.nats / self.tokens


def totals(cells: Iterable[Cell]) -> Totals:
    """Adds up cells of one rule.

    Raises:
        ValueError: a cell was not judged, does not tell its loss, or is not of speculation.
    """
    return Totals(*map(sum, zip(*map(_counts, cells), strict=True)))


def _counts(cell: Cell) -> tuple[float, ...]:
    if cell.acceptance is None or cell.quality is None:
        raise ValueError(f"{cell.key.label} has no acceptance or was not judged; sweep again.")
    if cell.key.lossy and cell.lost_nats is None:
        raise ValueError(f"{cell.key.label} is of an older sweep, without lost_nats; sweep again.")
    tokens = sum(output.output_tokens for output in cell.outputs)
    drafts, accepted = cell.acceptance.drafts, cell.acceptance.accepted_tokens
    return drafts, accepted, tokens, len(cell.outputs), cell.lost_nats or 0.0


def by_server(found: Iterable[Row]) -> list[Measured]:
    """Compares each rule with what is strict on its own server, else with strict decoding.

    What else differs between two servers then stays out of the comparison.

    Args:
        found: rules at one point of the grid.
    """
    servers: dict[str | None, list[Row]] = {None: []}
    for row in found:
        servers.setdefault(row.key.metric and _family(row.key), []).append(row)
    strict = servers.pop(None)
    measured = measure(strict)
    for own in servers.values():
        beside = [] if any(not row.key.lossy for row in own) else strict
        measured += measure([*beside, *own])[len(beside) :]
    return measured


class Frontier:
    """The rules of one draft and K over the folds of a sweep.

    Args:
        cells: those of this draft and K, `standard` among them.

    Raises:
        ValueError: `standard` is missing, or a rule was not measured on each fold.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.folds = sorted({cell.key.dataset for cell in cells})
        self._cells: dict[str, list[Cell]] = {}
        for cell in cells:
            self._cells.setdefault(cell.key.rule, []).append(cell)
        if "standard" not in self._cells:
            raise ValueError("the sweep has no method 'standard'; measure it beside MARS.")
        for rule, own in self._cells.items():
            if {cell.key.dataset for cell in own} != set(self.folds):
                raise ValueError(f"{rule} was not measured on each of {', '.join(self.folds)}.")

    def families(self) -> dict[str, list[CellKey]]:
        """The rules by metric and options, each family from strict to loose."""
        keys = [own[0].key for own in self._cells.values() if own[0].key.metric]
        keys.sort(key=lambda key: (key.metric or "", key.variant, key.looseness))
        return {family: list(own) for family, own in groupby(keys, _family)}

    @cached_property
    def speeds(self) -> dict[str, Measured]:
        """What is known of each rule's speed over all folds, by rule."""
        found = rows(together([cell for own in self._cells.values() for cell in own]))
        return {it.row.key.rule: it for it in by_server(found)}

    def of(self, rule: str, without: str | None = None) -> Totals:
        """A rule over the folds but one."""
        return totals(cell for cell in self._cells[rule] if cell.key.dataset != without)

    def scores(self, rule: str) -> dict[str, float]:
        """Means over the prompts whose answers have the score, by its name."""
        prompts = mean_scores(self._cells[rule]).values()
        found = {name: [of[name] for of in prompts if name in of] for name in SCORES}
        return {name: statistics.fmean(values) for name, values in found.items() if values}

    def extra(self, rule: str, without: str | None = None) -> float:
        """Its share of acceptance length above strict decoding."""
        strict = self.of("standard", without)
        return self.of(rule, without).acceptance / strict.acceptance - 1

    def curve(self, family: str, without: str | None = None) -> list[tuple[float, float]]:
        """Loss and extra acceptance of a family's rules, strict decoding first."""
        rules = [key.rule for key in self.families().get(family, ())]
        points = [(self.of(rule, without).loss, self.extra(rule, without)) for rule in rules]
        return [(0.0, 0.0), *sorted(points)]

    def at(self, family: str, loss: float, without: str | None = None) -> float:
        """Extra acceptance of a family at a loss; NaN beyond its measured points."""
        x, y = zip(*self.curve(family, without), strict=True)
        return float(np.interp(loss, x, y, right=np.nan))

    def jackknife(self, figure: Callable[[str | None], float]) -> dict[str, float] | None:
        """A figure over all folds with its interval.

        Args:
            figure: the figure without the fold that it is given, or over all for None.

        Returns:
            value, low and high; None where the figure is not known without some fold.
        """
        value = figure(None)
        left = np.array([figure(fold) for fold in self.folds])
        count = len(left)
        if count < 2 or not np.isfinite([value, *left]).all():
            return None
        error = float(np.sqrt((count - 1) / count * ((left - left.mean()) ** 2).sum()))
        # Half of what is left out lies on each side.
        reach = stats.t.ppf((1 + COVERAGE / 100) / 2, count - 1) * error
        return {"value": value, "low": value - reach, "high": value + reach}

    def summary(
        self, losses: Sequence[float] = LOSSES, *, with_speeds: bool = False
    ) -> dict[str, Any]:
        """All figures, as the result file has them; metrics are compared at these losses."""
        families = self.families()
        rules = ["standard", *(key.rule for keys in families.values() for key in keys)]
        return {
            "folds": self.folds,
            "prompts": len(mean_scores(self._cells["standard"])),
            "rules": [
                self._rule(rule) | (self._speed(rule) if with_speeds else {}) for rule in rules
            ],
            "curves": {family: self.curve(family) for family in families},
            "at_equal_loss": [self._at_equal_loss(loss, list(families)) for loss in losses],
        }

    def _at_equal_loss(self, loss: float, families: Sequence[str]) -> dict[str, Any]:
        """What each family accepts at a loss, and how much more the price does."""

        def over(family: str, without: str | None) -> float:
            price = self.at(_of_metric("price", family), loss, without)
            return price / self.at(family, loss, without)

        return {
            "loss": loss,
            "extra_acceptance": {
                family: self.jackknife(partial(self.at, family, loss)) for family in families
            },
            "price_over": {
                family: self.jackknife(partial(over, family))
                for family in families
                if family != _of_metric("price", family) in families
            },
        }

    def _rule(self, rule: str) -> dict[str, Any]:
        own = self.of(rule)
        return {
            "rule": rule,
            "acceptance_length": own.acceptance,
            # Of a request, steps without a draft included.
            "tokens_per_step": own.tokens / (own.tokens - own.accepted),
            "extra_acceptance": self.jackknife(lambda fold: self.extra(rule, fold)),
            "loss": self.jackknife(lambda fold: self.of(rule, fold).loss),
            "tokens_per_answer": own.tokens / own.answers,
            **self.scores(rule),
        }

    def _speed(self, rule: str) -> dict[str, Any]:
        speed = self.speeds[rule]
        faster = speed.faster and speed.faster._asdict()
        return {**speed.times, "strict_tpot_over_tpot": faster}


def _family(key: CellKey) -> str:
    return f"{key.metric}{key.variant}"


def _of_metric(metric: str, family: str) -> str:
    """The family of a metric with the same options."""
    return metric + family[len(next(name for name in METRICS if family.startswith(name))) :]


class Axis(NamedTuple):
    """What is drawn: a rule's figure, with the ends of its interval where these are drawn too."""

    label: str
    of: Callable[[Frontier, str], Sequence[float]]


LOSS = Axis(
    "loss, thousandths of a nat per token", lambda found, rule: [1000 * found.of(rule).loss]
)
EXTRA = Axis("acceptance length above strict, %", lambda found, rule: [100 * found.extra(rule)])
REPEATS = Axis(
    "repeated 4-grams, % of an answer's",
    lambda found, rule: [100 * found.scores(rule)["repeated_4grams"]],
)
SPEED = Axis(
    "speed of further tokens, x strict",
    lambda found, rule: found.speeds[rule].faster or [np.nan] * 3,
)


def chart(frontier: Frontier, x: Axis, y: Axis) -> Chart:
    """Two figures of each rule; a family's curve starts at strict decoding."""
    curves = []
    for family, keys in frontier.families().items():
        names = {"standard": "", **{key.rule: f"{key.value:g}" for key in keys}}
        points = [Point(x.of(frontier, rule), y.of(frontier, rule), names[rule]) for rule in names]
        curves.append(Curve(family, keys[0].metric, keys[0].variant, points))
    curves.sort(key=lambda curve: curve.variant, reverse=True)
    return Chart(x.label, y.label, curves, y.of(frontier, "standard")[0])


def plot(frontiers: dict[str, Frontier], path: Path, *panels: tuple[Axis, Axis]) -> None:
    """Draws each of these pairs of figures, with a row per draft."""
    # Only plots need it.
    from matplotlib.figure import Figure

    size = 5.5 * len(panels), 4.2 * len(frontiers)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(frontiers), len(panels), squeeze=False)
    for (title, frontier), row in zip(frontiers.items(), grid, strict=True):
        for axes, pair in zip(row, panels, strict=True):
            chart(frontier, *pair).draw(axes)
            axes.set(title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Calculates; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sweep", type=Path, nargs="+", help="files of `vllm-mars sweep`")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument(
        "--losses", type=float, nargs="+", default=LOSSES, metavar="NATS",
        help="nats per token at which metrics are compared",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, help="PNG file of acceptance and repetition")
    parser.add_argument(
        "--speeds", type=Path, help="PNG file of speed, which the JSON then has too"
    )
    args = parser.parse_args()
    cells = [cell for cell in read_cells(args.sweep) if cell.status == "ok" and cell.key.k]
    by_draft: dict[str, list[Cell]] = {}
    for cell in cells:
        by_draft.setdefault(f"{cell.key.draft}, K {cell.key.k}", []).append(cell)
    frontiers = {title: Frontier(own) for title, own in by_draft.items()}
    result = {
        "schema": "vllm-mars/frontier/1",
        # Of the measurement: this command only calculates.
        **cells[0].origin,
        "sweep": [path.name for path in args.sweep],
        "drafts": {
            title: frontier.summary(args.losses, with_speeds=args.speeds is not None)
            for title, frontier in frontiers.items()
        },
    }
    write_json(args.output, result)
    if args.plot:
        plot(frontiers, args.plot, (LOSS, EXTRA), (EXTRA, REPEATS))
    if args.speeds:
        plot(frontiers, args.speeds, (LOSS, SPEED))
    return 0


if __name__ == "__main__":
    sys.exit(main())
