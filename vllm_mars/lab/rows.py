"""Rows of a sweep's tables: one per cell, with ratios to the baseline.

Values are averaged over passes. 95% intervals come from a paired bootstrap over prompts, or over
blocks for values that the server counts. Times and their ratios are means of the middle half,
because other work on the machine makes a few of them several times too long. If it slows a whole
turn, no mean helps, and `is_uneven` is set.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_mars.lab.plan import Cell
from vllm_mars.lab.records import Measured, Record, SweepFile

if TYPE_CHECKING:
    from rich.table import Table

Numbers = NDArray[np.float64]
RESAMPLES = 5_000
# A larger ratio of a rule's fastest turn to its slowest is due to other work on the machine.
UNEVEN = 4 / 3


class Interval(NamedTuple):
    """An estimate and its 95% interval, which is infinite for a single sample."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """Results of a cell; None if not measured or not applicable."""

    cell: Cell
    problem: str = ""  # first line of the reason why turns failed
    answers: int = 0  # number of answers
    paces: tuple[float, ...] = ()  # tokens per second of an answer, per turn
    ttft: Interval | None = None  # seconds to the first token, median over prompts
    time: Interval | None = None  # seconds per answer
    speed: Interval | None = None  # the baseline's `time` / `time`
    tpot: Interval | None = None  # seconds per token after the first
    token_speed: Interval | None = None  # the baseline's `tpot` / `tpot`
    tokens_per_second: Interval | None = None  # of all requests
    steps: Interval | None = None  # tokens per step (vLLM's mean acceptance length)
    gain: Interval | None = None  # `steps` / the baseline's
    step_ratio: Interval | None = None  # seconds per step / the baseline's, at concurrency 1
    lost: Interval | None = None  # nats per token; 0 if strict
    drift: Interval | None = None  # nats per token
    length: Interval | None = None  # tokens per answer

    @property
    def is_uneven(self) -> bool:
        """Whether turns differ too much to report a speed."""
        return bool(self.paces) and max(self.paces) > UNEVEN * min(self.paces)


def rows(file: SweepFile) -> list[Row]:
    """Returns a row per cell, ordered by temperature and load with the baseline first."""
    cells: dict[tuple[float, int, str], list[Record]] = {}
    for record in file.records:
        key = (record.temperature, record.concurrency, record.name)
        cells.setdefault(key, []).append(record)
    baseline = file.heads[-1].baseline
    results = []
    for (temperature, load, name), records in sorted(
        cells.items(), key=lambda item: (*item[0][:2], item[0][2] != baseline)
    ):
        base = [] if name == baseline else cells.get((temperature, load, baseline), [])
        results.append(_row(records, base))
    return results


def _row(records: Sequence[Record], base: Sequence[Record]) -> Row:
    cell = records[0].cell
    turns = [record.measured for record in records if record.measured]
    if not turns:
        return Row(cell, records[0].problem)
    prompts, blocks = _by_prompt(records), _by_block(records)
    base_prompts, base_blocks = _by_prompt(base), _by_block(base)
    speculates = any(turn.drafts for turn in turns)
    figures = {
        "ttft": estimate(np.median, prompts, ["ttft"]),
        "time": estimate(_middle, prompts, ["seconds"]),
        # A ratio of means, since sampled answers to one prompt differ in length.
        "speed": compared(_middle, base_prompts, prompts, ["seconds"]),
        "tpot": estimate(ratio_of_middles, prompts, ["further", "more"]),
        "token_speed": compared(ratio_of_middles, base_prompts, prompts, ["further", "more"]),
        "tokens_per_second": estimate(ratio_of_middles, blocks, ["tokens", "seconds"]),
        "length": estimate(np.mean, prompts, ["tokens"]),
    }
    if speculates:
        figures |= {
            "steps": estimate(ratio_of_means, blocks, ["stepped", "drafts"]),
            "gain": compared(ratio_of_means, blocks, base_blocks, ["stepped", "drafts"]),
        }
    if speculates and cell.concurrency == 1:
        names = ["further", "drafts"]
        figures["step_ratio"] = compared(ratio_of_middles, blocks, base_blocks, names)
    if all(turn.lost_nats is not None for turn in turns):
        figures["lost"] = estimate(ratio_of_means, blocks, ["lost", "tokens"])
    elif cell.lossy_reason is None:
        figures["lost"] = Interval(0.0, 0.0, 0.0)
    if all(turn.drift_nats is not None for turn in turns):
        figures["drift"] = estimate(ratio_of_means, blocks, ["drift", "tokens"])
    return Row(
        cell=cell,
        problem=next((record.problem for record in records if not record.measured), ""),
        answers=sum(len(turn.answers) for turn in turns),
        paces=tuple(_pace_of_turn(turn) for turn in turns),
        **figures,
    )


def _pace_of_turn(turn: Measured) -> float:
    times = [answer.seconds / answer.tokens for answer in turn.answers]
    return float(1 / _middle(np.array(times)))


# Values by prompt or block, each by name.
Samples = Mapping[Any, Mapping[str, float]]


def _by_prompt(records: Sequence[Record]) -> Samples:
    by_prompt: dict[Any, list[dict[str, float]]] = {}
    for record in records:
        for answer in record.measured.answers if record.measured else ():
            values = {
                "ttft": answer.ttft,
                "seconds": answer.seconds,
                "tokens": float(answer.tokens),
                # After the first token.
                "further": answer.seconds - answer.ttft,
                "more": answer.tokens - 1.0,
            }
            by_prompt.setdefault(answer.prompt, []).append(values)
    return {name: means_of(samples) for name, samples in by_prompt.items()}


def _by_block(records: Sequence[Record]) -> Samples:
    by_block: dict[Any, list[dict[str, float]]] = {}
    for record in records:
        if record.measured:
            by_block.setdefault(record.block, []).append(_totals(record.measured))
    return {block: means_of(samples) for block, samples in by_block.items()}


def _totals(measured: Measured) -> dict[str, float]:
    return {
        "seconds": measured.seconds,
        "tokens": float(sum(answer.tokens for answer in measured.answers)),
        "further": sum(answer.seconds - answer.ttft for answer in measured.answers),
        "drafts": float(measured.drafts),
        "stepped": float(measured.drafts + measured.accepted),
        "lost": measured.lost_nats or 0.0,
        "drift": measured.drift_nats or 0.0,
    }


def means_of(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([sample[name] for sample in samples])) for name in samples[0]}


def pace(records: Sequence[Record], base: Sequence[Record] = ()) -> Interval | None:
    """Seconds per token of whole answers; with a base, the speed-up over it."""
    prompts = _by_prompt(records)
    names = ["seconds", "tokens"]
    if not base:
        return estimate(ratio_of_middles, prompts, names)
    return compared(ratio_of_middles, _by_prompt(base), prompts, names)


def ratio_of_means(above: Numbers, below: Numbers, axis: int = -1) -> Any:
    return above.sum(axis) / below.sum(axis)


def _middle(values: Numbers, axis: int = -1) -> Any:
    # The mean of the middle half.
    from scipy.stats import trim_mean

    return trim_mean(values, 0.25, axis)


def ratio_of_middles(above: Numbers, below: Numbers, axis: int = -1) -> Any:
    return _middle(above / below, axis)


def compared(
    statistic: Callable[..., Any],
    samples: Samples,
    base: Samples,
    names: Sequence[str],
    between: Callable[..., Any] = np.divide,
) -> Interval | None:
    """Compares a statistic over the prompts or blocks that both have, by default as a ratio."""
    both = {
        key: {
            f"{side}{name}": values[key][name]
            for side, values in enumerate((samples, base))
            for name in names
        }
        for key in samples
        if key in base
    }

    def compared(*values: Numbers, axis: int = -1) -> Any:
        values_of_samples = values[: len(names)]
        values_of_base = values[len(names) :]
        if statistic is ratio_of_middles:
            # The middle half of the ratios of prompts or blocks.
            return _middle(np.divide(*values_of_samples) / np.divide(*values_of_base), axis)
        return between(
            statistic(*values_of_samples, axis=axis), statistic(*values_of_base, axis=axis)
        )

    return estimate(compared, both, [f"{side}{name}" for side in range(2) for name in names])


def estimate(
    statistic: Callable[..., Any], samples: Samples, names: Sequence[str]
) -> Interval | None:
    """Evaluates a statistic over prompts or blocks, with a paired bootstrap interval."""
    from scipy.stats import bootstrap

    values = [np.array([sample[name] for sample in samples.values()]) for name in names]
    if not samples or not np.all(np.isfinite(values)):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*values, axis=-1))
        if not np.isfinite(value):
            return None
        if len(samples) == 1:
            return Interval(value, -np.inf, np.inf)
        ends = bootstrap(
            values,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
    return Interval(value, float(ends.low), float(ends.high))


def shown(interval: Interval | None, form: str, times: float = 1, *, ends: bool = True) -> str:
    """Formats an estimate with its interval, if known: "1.15 (1.02 to 1.33)"."""
    if interval is None:
        return ""
    value, low, high = (f"{times * end:{form}}" for end in interval)
    known = ends and np.isfinite(interval.high) and low != high
    return f"{value} ({low} to {high})" if known else value


# Text of each column; a column without text in any row is omitted.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "rule": lambda row: row.cell.name,
    "s per answer": lambda row: shown(row.time, ".2f", ends=False),
    "speed": lambda row: shown(row.speed, ".2f"),
    "ms to first token": lambda row: shown(row.ttft, ".0f", 1000, ends=False),
    "ms per further token": lambda row: shown(row.tpot, ".1f", 1000, ends=False),
    "tokens' speed": lambda row: shown(row.token_speed, ".2f"),
    "tokens/s": lambda row: (
        "" if row.cell.concurrency == 1 else shown(row.tokens_per_second, ".1f", ends=False)
    ),
    "tokens per step": lambda row: shown(row.steps, ".2f", ends=False),
    "steps' gain": lambda row: shown(row.gain, ".2f"),
    "nats lost per token": lambda row: shown(row.lost, ".4f", ends=False),
    "drift": lambda row: shown(row.drift, "+.4f", ends=False),
    "tokens per answer": lambda row: shown(row.length, ".1f", ends=False),
    "failed": lambda row: row.problem,
}
TIMES = ("time", "speed", "ttft", "tpot", "token_speed", "tokens_per_second")
# Their titles end in the baseline's name.
RATIOS = ("speed", "tokens' speed", "steps' gain")


class TextTable(NamedTuple):
    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[str]]


def without_times(row: Row) -> Row:
    nothing: dict[str, Any] = dict.fromkeys(TIMES)
    return replace(row, **nothing)


def points(rows: Sequence[Row]) -> list[list[Row]]:
    by_point = itertools.groupby(rows, lambda row: (row.cell.temperature, row.cell.concurrency))
    return [list(group) for _, group in by_point]


def temperature_label(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def tables(rows: Sequence[Row], baseline: str) -> list[TextTable]:
    texts = []
    for group in points(rows):
        _, _, temperature, load = group[0].cell
        names = [name for name, text in COLUMNS.items() if any(map(text, group))]
        answers = max(row.answers for row in group)
        title = (
            f"{temperature_label(temperature)}, {load} request{'s' if load > 1 else ''} at a time, "
            f"{answers} answers"
        )
        body = [[COLUMNS[name](row) for name in names] for row in group]
        named = [f"{name} x {baseline}" if name in RATIOS else name for name in names]
        texts.append(TextTable(title, named, body))
    return texts


def transposed(table: TextTable) -> TextTable:
    """Transposes a table, so that few rules fit the width of a terminal."""
    columns = zip(table.names, *table.rows, strict=True)
    (_, *rules), *body = columns
    return TextTable(table.title, ["", *rules], body)


def rich_table(table: TextTable) -> "Table":
    from rich.table import Column, Table

    first, *others = table.names
    rich = Table(first, *(Column(name, justify="right") for name in others), title=table.title)
    for row in table.rows:
        rich.add_row(*row)
    return rich
