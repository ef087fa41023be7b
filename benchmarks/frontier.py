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
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from vllm_mars.config import METRICS
from vllm_mars.experiments.quality.judge import mean_scores
from vllm_mars.experiments.report.measured import Measured, measure
from vllm_mars.experiments.sweep.record_file import read_cells
from vllm_mars.experiments.sweep.records import Cell, CellKey
from vllm_mars.experiments.sweep.summary import Row, rows
from vllm_mars.local.intervals import COVERAGE
from vllm_mars.local.result_file import write_json

# Nats per token at which metrics are compared.
LOSSES = (0.0075, 0.02, 0.03, 0.05, 0.07)
COLORS = {"ratio": "#0072b2", "gap": "#009e73", "price": "#d55e00"}
# Where a point's value stands beside it, in points: each metric's on a side of its own.
LABELS = {"ratio": (5, -13), "gap": (8, -4), "price": (-8, 7)}


@dataclass(frozen=True)
class Totals:
    """One rule over the prompts of some folds.

    Attributes:
        drafts: verification steps of single requests that had a draft.
        accepted: draft tokens that were accepted.
        tokens: output tokens.
        nats: what they lost against the target's first choices.
        prompts: how many.
        answers: to all of them, in all passes.
        scores: means over the prompts whose answers have the score, by name.
    """

    drafts: int
    accepted: int
    tokens: int
    nats: float
    prompts: int
    answers: int
    scores: dict[str, float]

    @property
    def acceptance(self) -> float:
        """Mean acceptance length as vLLM counts it, the target's own token included."""
        return 1 + self.accepted / self.drafts

    @property
    def tokens_per_step(self) -> float:
        """Output tokens by steps of a request, those without a draft included."""
        return self.tokens / (self.tokens - self.accepted)

    @property
    def loss(self) -> float:
        """Nats per output token."""
        return self.nats / self.tokens


SCORES = ("repeated_4grams", "agreement", "rouge_l", "exact_match", "nll")


def totals(cells: Sequence[Cell]) -> Totals:
    """Adds up cells of one rule.

    Raises:
        ValueError: a cell was not judged, does not tell its loss, or is not of speculation.
    """
    drafts = accepted = tokens = answers = 0
    nats = 0.0
    for cell in cells:
        if cell.acceptance is None or cell.quality is None:
            raise ValueError(f"{cell.key.label} has no acceptance or was not judged; sweep again.")
        drafts += cell.acceptance.drafts
        accepted += cell.acceptance.accepted_tokens
        tokens += sum(output.output_tokens for output in cell.outputs)
        answers += len(cell.outputs)
        if cell.key.lossy and cell.lost_nats is None:
            raise ValueError(
                f"{cell.key.label} is of an older sweep, without lost_nats; sweep again."
            )
        nats += cell.lost_nats or 0.0
    prompts = mean_scores(cells).values()
    scores = {
        name: statistics.fmean(prompt[name] for prompt in prompts if name in prompt)
        for name in SCORES
        if any(name in prompt for prompt in prompts)
    }
    return Totals(drafts, accepted, tokens, nats, len(prompts), answers, scores)


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

    @cached_property
    def speeds(self) -> dict[str, Measured]:
        """What is known of each rule's speed over all folds, by rule."""
        cells = [cell for own in self._cells.values() for cell in own]
        return _speeds(
            rows([replace(cell, key=replace(cell.key, dataset="all folds")) for cell in cells])
        )

    def keys(self) -> list[CellKey]:
        """One key of each rule, by metric, options and how far it goes."""
        keys = [own[0].key for own in self._cells.values() if own[0].key.metric]
        return sorted(keys, key=lambda key: (key.metric or "", key.variant, _looseness(key)))

    def of(self, rule: str, without: str | None = None) -> Totals:
        """A rule over the folds but one."""
        return totals([cell for cell in self._cells[rule] if cell.key.dataset != without])

    def extra(self, rule: str, without: str | None = None) -> float:
        """Its share of acceptance length above strict decoding."""
        strict = self.of("standard", without)
        return self.of(rule, without).acceptance / strict.acceptance - 1

    def curve(self, family: str, without: str | None = None) -> list[tuple[float, float]]:
        """Loss and extra acceptance of a family's rules, strict decoding first."""
        rules = [key.rule for key in self.keys() if _family(key) == family]
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

    def summary(self, *, with_speeds: bool = False) -> dict[str, Any]:
        """All figures, as the result file has them."""
        families = list(dict.fromkeys(_family(key) for key in self.keys()))
        rules = ["standard", *(key.rule for key in self.keys())]
        return {
            "folds": self.folds,
            "prompts": self.of("standard").prompts,
            "rules": [
                self._rule(rule) | (self._speed(rule) if with_speeds else {}) for rule in rules
            ],
            "curves": {family: self.curve(family) for family in families},
            "at_equal_loss": [self._at_equal_loss(loss, families) for loss in LOSSES],
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
            "tokens_per_step": own.tokens_per_step,
            "extra_acceptance": self.jackknife(lambda fold: self.extra(rule, fold)),
            "loss": self.jackknife(lambda fold: self.of(rule, fold).loss),
            "tokens_per_answer": own.tokens / own.answers,
            **own.scores,
        }

    def _speed(self, rule: str) -> dict[str, Any]:
        speed = self.speeds[rule]
        found = {
            "ttft_seconds": speed.ttft,
            "tpot_seconds": speed.tpot,
            "strict_tpot_over_tpot": speed.faster,
            "seconds_per_answer": speed.seconds,
        }
        return {name: at and at._asdict() for name, at in found.items()}


def _speeds(found: Sequence[Row]) -> dict[str, Measured]:
    """Compares each rule with what is strict on its own server, else with `standard`.

    What else differs between two servers then stays out of the comparison.
    """
    standard = [row for row in found if row.key.method == "standard"]
    speeds = {it.row.key.rule: it for it in measure(standard)}
    servers: dict[str, list[Row]] = {}
    for row in found:
        if row.key.metric:
            servers.setdefault(_family(row.key), []).append(row)
    for own in servers.values():
        beside = [] if any(not row.key.lossy for row in own) else standard
        speeds |= {it.row.key.rule: it for it in measure([*beside, *own])}
    return speeds


def _family(key: CellKey) -> str:
    return f"{key.metric}{key.variant}"


def _of_metric(metric: str, family: str) -> str:
    """The family of a metric with the same options."""
    return metric + family[len(next(name for name in METRICS if family.startswith(name))) :]


def _looseness(key: CellKey) -> float:
    value = key.value or 0.0
    return -value if key.metric == "ratio" else value


def plot(frontiers: dict[str, Frontier], path: Path) -> None:
    """Draws extra acceptance by loss and repeated 4-grams by extra acceptance, a row per draft."""
    figure, grid = _panels(len(frontiers), 2)
    for (title, frontier), (gain, repeats) in zip(frontiers.items(), grid, strict=True):
        strict = frontier.of("standard")
        strict_repeats = 100 * strict.scores["repeated_4grams"]
        for family, keys in groupby(frontier.keys(), _family):
            rules = list(keys)
            known = [(frontier.of(key.rule), frontier.extra(key.rule)) for key in rules]
            own = {
                "color": COLORS[str(rules[0].metric)],
                "marker": "o",
                "linestyle": "-" if len(rules) > 1 else "none",
                "fillstyle": "full" if len(rules) > 1 else "none",
                "label": family,
            }
            extra = [0.0, *(100 * more for _, more in known)]
            loss = [0.0, *(1000 * of.loss for of, _ in known)]
            repeated = [
                strict_repeats,
                *(100 * of.scores["repeated_4grams"] for of, _ in known),
            ]
            first = 0 if len(rules) > 1 else 1
            gain.plot(loss[first:], extra[first:], **own)
            repeats.plot(extra[first:], repeated[first:], **own)
            for key, *at in zip(rules, loss[1:], extra[1:], strict=True):
                _label(gain, key, at)
        repeats.axhline(strict_repeats, color="black", linewidth=1)
        gain.set(
            title=title,
            xlabel="loss, thousandths of a nat per token",
            ylabel="acceptance length above strict, %",
        )
        repeats.set(
            title=f"{title} (line: strict)",
            xlabel="acceptance length above strict, %",
            ylabel="repeated 4-grams, % of an answer's",
        )
        gain.legend(frameon=False, fontsize="small")
        for axes in (gain, repeats):
            axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _panels(lines: int, columns: int) -> tuple[Any, Any]:
    # Only plots need it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * columns, 4.2 * lines), layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False)


def _label(axes: Any, key: CellKey, at: Sequence[float]) -> None:
    metric = str(key.metric)
    axes.annotate(
        f"{key.value:g}",
        at,
        LABELS[metric],
        textcoords="offset points",
        color=COLORS[metric],
        ha="right" if LABELS[metric][0] < 0 else "left",
    )


def plot_speed(frontiers: dict[str, Frontier], path: Path) -> None:
    """Draws by loss how much sooner than under strict verification further tokens come."""
    figure, grid = _panels(1, len(frontiers))
    for axes, (title, frontier) in zip(grid[0], frontiers.items(), strict=True):
        for family, group in groupby(frontier.keys(), _family):
            keys = list(group)
            speeds = [frontier.speeds[key.rule].faster or (math.nan,) * 3 for key in keys]
            # Each curve starts at strict decoding.
            x = [0.0, *(1000 * frontier.of(key.rule).loss for key in keys)]
            y, low, high = (np.array([1.0, *ends]) for ends in zip(*speeds, strict=True))
            color = COLORS[str(keys[0].metric)]
            axes.plot(x, y, color=color, marker="o", label=family)
            axes.vlines(x, low, high, color=color, alpha=0.4)
            for key, *at in zip(keys, x[1:], y[1:], strict=True):
                _label(axes, key, at)
        axes.axhline(1, color="black", linewidth=1)
        axes.set(
            title=title,
            xlabel="loss, thousandths of a nat per token",
            ylabel="speed of further tokens, x strict",
        )
        axes.legend(frameon=False, fontsize="small", loc="upper left")
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Calculates; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sweep", type=Path, nargs="+", help="files of `vllm-mars sweep`")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
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
    run = ("created", "git_commit", "versions", "hardware", "load_average", "command", "weights")
    result = {
        "schema": "vllm-mars/frontier/1",
        # Of the measurement: this command only calculates.
        **{name: getattr(cells[0], name) for name in run},
        "sweep": [path.name for path in args.sweep],
        "drafts": {
            title: frontier.summary(with_speeds=args.speeds is not None)
            for title, frontier in frontiers.items()
        },
    }
    write_json(args.output, result)
    for draw, path in ((plot, args.plot), (plot_speed, args.speeds)):
        if path:
            draw(frontiers, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
