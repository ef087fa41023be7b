"""Which plots the report draws from summarised cells and calibrations."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_mars.calibration import OPTION
from vllm_mars.experiments.report.plots import (
    Plot,
    Series,
    bars,
    curve,
    frontier,
    histogram,
    lines,
    pareto,
)
from vllm_mars.experiments.sweep.records import CellKey
from vllm_mars.experiments.sweep.summary import Row

Calibrations = Sequence[tuple[str, dict[str, Any]]]

# Score, name on the axis, whether the difference to autoregressive decoding is shown, and whether
# more is better.
_SCORES = (
    ("exact_match", "exact match, recovery", True, True),
    ("pass_at_1", "pass@1, recovery", True, True),
    ("json_valid", "valid JSON, recovery", True, True),
    ("nll", "NLL per token over autoregressive, nats", True, False),
    ("chrf", "chrF to the autoregressive answer", False, True),
)
# The rule that stands for strict verification, and the one for the margin.
_STRICT, _LOOSE = "standard", "mars"


def pareto_plots(found: Sequence[Row]) -> list[Plot]:
    """Quality against speed, one plot for each point of the grid and score."""
    plots = []
    for point, group in _points(found, "dataset", "concurrency"):
        reference = [row for row in group if row.key.method == "autoregressive"]
        if not reference:
            continue
        for name, label, compared, higher in _SCORES:
            series = [
                item for row in group if (item := _quality_point(row, name, compared)) is not None
            ]
            if len(series) < 2:
                continue
            points = [(item.x[0], item.y[0]) for item in series]
            best = {series[points.index(it)].label for it in frontier(points, higher=higher)}
            plots.append(
                Plot(
                    _slug("pareto", *point, name),
                    f"{label}, {_words(point)}",
                    f"Beaten by no other rule: {', '.join(sorted(best))}.",
                    pareto(series, "x autoregressive speed", label, higher=higher),
                    len(series),
                )
            )
    return plots


def _quality_point(row: Row, name: str, compared: bool) -> Series | None:
    own = row.key.method == "autoregressive"
    speed = 1.0 if own and row.cells else row.speedup
    estimate = row.estimate(name)
    if speed is None:
        return None
    label = _label(row.key)
    if own:
        # It does not differ from itself, and its recovery and likeness are 1, where there are any.
        if estimate is None and compared:
            return None
        return Series(label, [speed], [0.0 if name == "nll" else 1.0])
    if estimate is None:
        return None
    y, low, high = (
        (estimate.value, estimate.low, estimate.high)
        if not compared
        else (estimate.difference, estimate.difference_low, estimate.difference_high)
        if name == "nll"
        else (estimate.recovery, estimate.recovery_low, estimate.recovery_high)
    )
    if y is None or low is None or high is None:
        return None
    return Series(label, [speed], [y], [low], [high])


def acceptance_plots(found: Sequence[Row]) -> list[Plot]:
    """Acceptance by draft position; all datasets together."""
    plots = []
    for point, group in _points(found, "draft"):
        series = []
        for rule, same in _by_rule(group):
            cells = [cell for row in same for cell in row.cells if cell.acceptance is not None]
            drafts = sum(cell.acceptance.drafts for cell in cells if cell.acceptance)
            if not drafts:
                continue
            by_position = [
                cell.acceptance.accepted_by_position for cell in cells if cell.acceptance
            ]
            shares = [sum(counts) / drafts for counts in zip(*by_position, strict=False)]
            if shares:
                series.append(Series(rule, range(1, len(shares) + 1), shares))
        if series:
            title = f"Accepted drafts by position, {_words(point)}"
            draw = lines(series, "draft position", "accepted / steps")
            plots.append(Plot(_slug("acceptance", *point), title, "", draw, len(series)))
    return plots


def load_plots(found: Sequence[Row]) -> list[Plot]:
    """Speed by concurrency, where a rule was measured at two or more."""
    plots = []
    for point, group in _points(found, "dataset"):
        series = []
        for rule, same in _by_rule(group):
            at = sorted(
                (row.key.concurrency, row.tokens_per_second)
                for row in same
                if row.tokens_per_second is not None
            )
            if len({concurrency for concurrency, _ in at}) > 1:
                series.append(Series(rule, [place for place, _ in at], [speed for _, speed in at]))
        if series:
            title = f"Speed by concurrency, {_words(point)}"
            draw = lines(series, "requests in flight", "output tokens / s", log2=True)
            plots.append(Plot(_slug("load", *point), title, "", draw, len(series)))
    return plots


def ladder_plots(found: Sequence[Row]) -> list[Plot]:
    """Speed of each draft, strict and relaxed, where there are two or more."""
    plots = []
    for point, group in _points(found, "dataset", "concurrency"):
        by_draft: dict[str, dict[str, float]] = {}
        for row in group:
            if row.key.method in (_STRICT, _LOOSE) and row.speedup is not None:
                name = f"{row.key.draft} K{row.key.k}"
                by_draft.setdefault(name, {})[row.key.rule] = row.speedup
        rules = sorted({rule for speeds in by_draft.values() for rule in speeds}, reverse=True)
        # A rule that only one draft was measured with tells nothing about drafts.
        rules = [rule for rule in rules if sum(rule in it for it in by_draft.values()) > 1]
        order = sorted(
            (draft for draft, speeds in by_draft.items() if any(rule in speeds for rule in rules)),
            key=lambda draft: max(by_draft[draft].values()),
        )
        if not rules:
            continue
        series = [
            Series(rule, [], [by_draft[draft].get(rule, math.nan) for draft in order])
            for rule in rules
        ]
        plots.append(
            Plot(
                _slug("drafts", *point),
                f"Speed by draft, {_words(point)}",
                "",
                bars([name.replace(" ", "\n") for name in order], series, "x autoregressive speed"),
            )
        )
    return plots


def margin_plots(calibrations: Calibrations) -> list[Plot]:
    """The margin histogram of each calibration, theta marked."""
    plots = []
    for name, content in calibrations:
        margins = content.get("margins")
        if not margins:
            continue
        marks = [(0.9, "theta 0.9")]
        if content["metric"] == "ratio" and content["threshold"] != 0.9:
            marks.append((content["threshold"], f"calibrated: {content['threshold']:g}"))
        above = sum(
            count
            for edge, count in zip(margins["edges"], margins["positions"], strict=False)
            if edge >= 0.9 - 1e-9
        )
        share = above / max(1, sum(margins["positions"]) + margins["not_positive"])
        others = [
            count - runner_up
            for count, runner_up in zip(margins["positions"], margins["runner_up"], strict=True)
        ]
        assert min(others) >= 0, "runners-up are positions"
        series = [
            Series("all verified positions", [], margins["positions"], colour=6),
            Series("the draft is the runner-up", [], margins["runner_up"], colour=1),
        ]
        plots.append(
            Plot(
                _slug("margins", name),
                f"z2 / z1 of {content['model'].get('name')}",
                f"{share:.0%} of the positions are above 0.9.",
                histogram(margins["edges"], series, marks, "z2 / z1", "positions"),
            )
        )
    return plots


def calibration_plots(calibrations: Calibrations) -> list[Plot]:
    """Predicted and measured cost of each threshold."""
    plots = []
    for name, content in calibrations:
        points = content.get("curve", [])
        if not points:
            continue
        option = OPTION[content["metric"]]
        tried = content.get("confirmations", [])
        predicted = Series(
            "predicted, with its 90 % bound",
            [point["threshold"] for point in points],
            [point["cost"] for point in points],
            high=[point["high"] for point in points],
        )
        measured = Series(
            "measured on held-out prompts",
            [item["threshold"] for item in tried],
            [item["cost"]["value"] for item in tried],
            [item["cost"]["low"] for item in tried],
            [item["cost"]["high"] for item in tried],
        )
        mark = (content["threshold"], f"calibrated: {content['threshold']:g}")
        draw = curve(
            predicted, measured, content["budget"], [mark], option, "cost of relaxed tokens, nats"
        )
        title = f"Cost by {option} of {content['model'].get('name')}"
        plots.append(Plot(_slug("calibration", name), title, "", draw))
    return plots


def _label(key: CellKey) -> str:
    return key.rule if not key.k else f"{key.rule} {key.draft} K{key.k}"


def _points(found: Iterable[Row], *names: str) -> list[tuple[tuple[str, ...], list[Row]]]:
    """Groups rows that one plot can hold.

    Args:
        found: the rows.
        names: what a plot tells apart besides model and temperature: "dataset", "concurrency",
            "draft" (without the autoregressive rows).
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in found:
        key = row.key
        words = {
            "dataset": key.dataset,
            "concurrency": f"concurrency {key.concurrency}",
            "draft": f"{key.draft} K{key.k}",
        }
        if "draft" in names and not key.k:
            continue
        point = (key.model, f"temperature {key.temperature:g}", *(words[name] for name in names))
        groups.setdefault(point, []).append(row)
    return list(groups.items())


def _by_rule(group: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    rules: dict[str, list[Row]] = {}
    for row in group:
        rules.setdefault(_label(row.key), []).append(row)
    return list(rules.items())


def _words(point: Sequence[str]) -> str:
    return ", ".join(point[1:])


def _slug(*parts: str) -> str:
    text = "-".join(parts)
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text)
