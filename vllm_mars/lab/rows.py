"""One row for each cell of a sweep, with ratios over the baseline: what every view shows.

Prompts are the sample: what is known of each prompt is averaged over the passes, and 95 % intervals
are those of a paired bootstrap over prompts. What a server counts is known of each block, so there
blocks are drawn. Times and their ratios are means of the middle half, because whatever else runs on
a machine makes a few of them several times too long. Where it slows a whole turn no mean helps:
then `is_uneven` says so.
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
# Between a rule's fastest turn and its slowest: more says how busy the machine was, not the rule.
UNEVEN = 4 / 3


class Interval(NamedTuple):
    """An estimate and the ends of its 95 % interval, infinite where one sample cannot tell."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One cell; None is what was not measured, or has no meaning there.

    Attributes:
        problem: why turns of it failed, in a line; "" where none did.
        answers: how many.
        ttft: seconds until the first token, the median over prompts.
        paces: tokens per second of an answer, in each turn.
        time: seconds per answer.
        speed: the baseline's `time` / this one.
        tpot: seconds per further token.
        token_speed: the baseline's `tpot` / this one.
        tokens_per_second: of all requests together.
        steps: tokens per step of a request (vLLM's mean acceptance length).
        gain: that / the baseline's.
        step_ratio: seconds per step, where one request is answered at a time / the baseline's.
        lost, drift: nats per token, by the server's counters; a strict rule loses 0.
        length: tokens per answer.
    """

    cell: Cell
    problem: str = ""
    answers: int = 0
    paces: tuple[float, ...] = ()
    ttft: Interval | None = None
    time: Interval | None = None
    speed: Interval | None = None
    tpot: Interval | None = None
    token_speed: Interval | None = None
    tokens_per_second: Interval | None = None
    steps: Interval | None = None
    gain: Interval | None = None
    step_ratio: Interval | None = None
    lost: Interval | None = None
    drift: Interval | None = None
    length: Interval | None = None

    @property
    def is_uneven(self) -> bool:
        """Whether its turns disagree too much to tell a speed."""
        return bool(self.paces) and max(self.paces) > UNEVEN * min(self.paces)


def rows(file: SweepFile) -> list[Row]:
    """A row for each cell, by temperature and load, the baseline's first."""
    cells: dict[tuple[float, int, str], list[Record]] = {}
    for record in file.records:
        key = (record.temperature, record.concurrency, record.name)
        cells.setdefault(key, []).append(record)
    name = file.heads[-1].baseline
    found = []
    for (temperature, load, own), records in sorted(
        cells.items(), key=lambda item: (*item[0][:2], item[0][2] != name)
    ):
        base = [] if own == name else cells.get((temperature, load, name), [])
        found.append(_row(records, base))
    return found


def _row(records: Sequence[Record], base: Sequence[Record]) -> Row:
    cell = records[0].cell
    own = [record.measured for record in records if record.measured]
    if not own:
        return Row(cell, records[0].problem)
    prompts, blocks = _by_prompt(records), _by_block(records)
    their_prompts, their_blocks = _by_prompt(base), _by_block(base)
    alone = cell.concurrency == 1
    speculates = any(it.drafts for it in own)
    counted = all(it.lost_nats is not None for it in own)
    figures = {
        "ttft": estimate(np.median, prompts, ["ttft"]),
        "time": estimate(_middle, prompts, ["seconds"]),
        # Not prompt by prompt, since sampled answers to one prompt differ in length.
        "speed": compared(_middle, their_prompts, prompts, ["seconds"]),
        "tpot": estimate(ratio_of_middles, prompts, ["further", "more"]),
        "token_speed": compared(ratio_of_middles, their_prompts, prompts, ["further", "more"]),
        "tokens_per_second": estimate(ratio_of_middles, blocks, ["tokens", "seconds"]),
        "length": estimate(np.mean, prompts, ["tokens"]),
    }
    if speculates:
        figures |= {
            "steps": estimate(ratio_of_means, blocks, ["stepped", "drafts"]),
            "gain": compared(ratio_of_means, blocks, their_blocks, ["stepped", "drafts"]),
        }
    if speculates and alone:
        names = ["further", "drafts"]
        figures["step_ratio"] = compared(ratio_of_middles, blocks, their_blocks, names)
    if counted:
        figures["lost"] = estimate(ratio_of_means, blocks, ["lost", "tokens"])
    elif not cell.is_lossy:
        figures["lost"] = Interval(0.0, 0.0, 0.0)
    if all(it.drift_nats is not None for it in own):
        figures["drift"] = estimate(ratio_of_means, blocks, ["drift", "tokens"])
    return Row(
        cell,
        next((it.problem for it in records if not it.measured), ""),
        sum(len(it.answers) for it in own),
        tuple(
            float(1 / _middle(np.array([of.seconds / of.tokens for of in it.answers])))
            for it in own
        ),
        **figures,
    )


# What is taken of an answer as it is.
_OF_ANSWERS = ("ttft", "seconds", "tokens")
# What is known of each prompt or block, by its name.
Samples = Mapping[Any, Mapping[str, float]]


def _by_prompt(records: Sequence[Record]) -> Samples:
    found: dict[Any, list[dict[str, float]]] = {}
    for record in records:
        for answer in record.measured.answers if record.measured else ():
            known = {
                **{name: float(getattr(answer, name)) for name in _OF_ANSWERS},
                "further": answer.seconds - answer.ttft,
                "more": answer.tokens - 1.0,
            }
            found.setdefault(answer.prompt, []).append(known)
    return {name: means_of(all_of) for name, all_of in found.items()}


def _by_block(records: Sequence[Record]) -> Samples:
    found: dict[Any, list[dict[str, float]]] = {}
    for record in records:
        if record.measured:
            found.setdefault(record.block, []).append(_totals(record.measured))
    return {block: means_of(all_of) for block, all_of in found.items()}


def _totals(measured: Measured) -> dict[str, float]:
    return {
        "seconds": measured.seconds,
        "tokens": float(sum(it.tokens for it in measured.answers)),
        "further": sum(it.seconds - it.ttft for it in measured.answers),
        "drafts": float(measured.drafts),
        "stepped": float(measured.drafts + measured.accepted),
        "lost": measured.lost_nats or 0.0,
        "drift": measured.drift_nats or 0.0,
    }


def means_of(all_of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([it[name] for it in all_of])) for name in all_of[0]}


def pace(records: Sequence[Record], base: Sequence[Record] = ()) -> Interval | None:
    """Seconds per token of whole answers, or, with a base, how many times as fast these are."""
    own, names = _by_prompt(records), ["seconds", "tokens"]
    if not base:
        return estimate(ratio_of_middles, own, names)
    return compared(ratio_of_middles, _by_prompt(base), own, names)


def ratio_of_means(above: Numbers, below: Numbers, axis: int = -1) -> Any:
    """Of the sums."""
    return above.sum(axis) / below.sum(axis)


def _middle(values: Numbers, axis: int = -1) -> Any:
    """The mean of the middle half."""
    from scipy.stats import trim_mean

    return trim_mean(values, 0.25, axis)


def ratio_of_middles(above: Numbers, below: Numbers, axis: int = -1) -> Any:
    return _middle(above / below, axis)


def compared(
    statistic: Callable[..., Any],
    own: Samples,
    base: Samples,
    names: Sequence[str],
    between: Callable[..., Any] = np.divide,
) -> Interval | None:
    """The first beside the second, of the prompts or blocks that both have: by default a ratio."""
    both = {
        key: {
            f"{side}{name}": of[key][name] for side, of in enumerate((own, base)) for name in names
        }
        for key in own
        if key in base
    }

    def compared(*values: Numbers, axis: int = -1) -> Any:
        of_own, of_base = values[: len(names)], values[len(names) :]
        if statistic is ratio_of_middles:
            # Prompt by prompt, or block by block.
            return _middle(np.divide(*of_own) / np.divide(*of_base), axis)
        return between(statistic(*of_own, axis=axis), statistic(*of_base, axis=axis))

    return estimate(compared, both, [f"{side}{name}" for side in range(2) for name in names])


def estimate(statistic: Callable[..., Any], of: Samples, names: Sequence[str]) -> Interval | None:
    """A statistic of what is known of each prompt or block, with a paired bootstrap's interval."""
    from scipy.stats import bootstrap

    values = [np.array([known[name] for known in of.values()]) for name in names]
    if not of or not np.all(np.isfinite(values)):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*values, axis=-1))
        if not np.isfinite(value):
            return None
        if len(of) == 1:
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


def shown(of: Interval | None, form: str, times: float = 1, *, ends: bool = True) -> str:
    """An estimate, with its interval where that is known, such as "1.15 (1.02 to 1.33)"."""
    if of is None:
        return ""
    value, low, high = (f"{times * end:{form}}" for end in of)
    known = ends and np.isfinite(of.high) and low != high
    return f"{value} ({low} to {high})" if known else value


# The text of each column; those that have none in any row are left out.
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
# Followed by the baseline's name.
RATIOS = ("speed", "tokens' speed", "steps' gain")


class Text(NamedTuple):
    """A table as text."""

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[str]]


def without_times(row: Row) -> Row:
    """The row where only tokens and losses are to be told."""
    nothing: dict[str, Any] = dict.fromkeys(TIMES)
    return replace(row, **nothing)


def points(found: Sequence[Row]) -> list[list[Row]]:
    """The rows of each temperature and load."""
    by_point = itertools.groupby(found, lambda row: (row.cell.temperature, row.cell.concurrency))
    return [list(group) for _, group in by_point]


def heat(temperature: float) -> str:
    """A temperature in words."""
    return f"temperature {temperature:g}" if temperature else "greedy"


def tables(found: Sequence[Row], baseline: str) -> list[Text]:
    """A table for each temperature and load; its last column says why turns failed, if any did."""
    texts = []
    for group in points(found):
        _, _, temperature, load = group[0].cell
        names = [name for name, text in COLUMNS.items() if any(map(text, group))]
        answers = max(row.answers for row in group)
        title = f"{heat(temperature)}, {load} request{'s' if load > 1 else ''} at a time"
        title += f", {answers} answers"
        body = [[COLUMNS[name](row) for name in names] for row in group]
        named = [f"{name} x {baseline}" if name in RATIOS else name for name in names]
        texts.append(Text(title, named, body))
    return texts


def turned(text: Text) -> Text:
    """The table with a column for each row, which fits a terminal where rules are few."""
    columns = zip(text.names, *text.rows, strict=True)
    (_, *rules), *body = columns
    return Text(text.title, ["", *rules], body)


def rich_table(text: Text) -> "Table":
    """The table for a terminal."""
    from rich.table import Column, Table

    first, *others = text.names
    table = Table(first, *(Column(it, justify="right") for it in others), title=text.title)
    for row in text.rows:
        table.add_row(*row)
    return table
