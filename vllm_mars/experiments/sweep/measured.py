"""What each rule of a sweep gives beside strict decoding: speed, length, loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_mars.experiments.metrics import METRICS
from vllm_mars.experiments.sweep.summary import Row
from vllm_mars.local.intervals import interval, median, resamples

# What is known of an answer.
TOKENS, CLOCK, SECONDS, COST, TTFT, TPOT = KNOWN = range(6)
# What the others are compared with: the first of these that was measured.
STRICT = ("standard", "mars", "block", "autoregressive")


class Interval(NamedTuple):
    """An estimate and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Measured:
    """One rule at one point of the grid, beside strict decoding there.

    Estimates are medians over the repeats, intervals those of a bootstrap over prompts; None is
    what was not measured. What is of an answer's first or further tokens is a median over prompts.

    Attributes:
        row: the rule and its quality.
        strict: what it is compared with; None where nothing strict was measured.
        tokens_per_second, speedup: output tokens of all requests; that / strict decoding's.
        seconds, sooner: of an answer; strict decoding's / these.
        ttft, tpot: seconds to the first token, and per further one.
        faster: strict decoding's TPOT / this one, prompt by prompt.
        length: tokens per answer.
        loss: log p(the target's first choice) - log p(token), in nats per token, minus strict
            decoding's. None at temperature > 0, where another than the first choice is no loss.
    """

    row: Row
    strict: Row | None
    tokens_per_second: Interval | None = None
    speedup: Interval | None = None
    seconds: Interval | None = None
    sooner: Interval | None = None
    ttft: Interval | None = None
    tpot: Interval | None = None
    faster: Interval | None = None
    length: Interval | None = None
    loss: Interval | None = None

    @property
    def family(self) -> str:
        """The rule without its threshold: the curve that it is a point of."""
        key = self.row.key
        if key.metric is None:
            return key.method
        return METRICS[key.metric] + key.variant

    @property
    def times(self) -> dict[str, dict[str, float] | None]:
        """The times of an answer as a result file has them, in seconds."""
        found = {
            "ttft_seconds": self.ttft,
            "tpot_seconds": self.tpot,
            "seconds_per_answer": self.seconds,
        }
        return {name: at and at._asdict() for name, at in found.items()}


def measure(point: Sequence[Row]) -> list[Measured]:
    """Compares the rows of one point of the grid: of one draft and K, and without drafts."""
    lossless = [row for row in point if row.cells and not row.key.lossy]
    strict = min(lossless, key=lambda row: STRICT.index(row.key.method), default=None)
    return [beside(row, strict) for row in point]


def beside(row: Row, strict: Row | None) -> Measured:
    """Compares a row with another one."""
    own = by_answer(row)
    base = {key: [np.nan] * len(KNOWN) for key in own} if strict is None else by_answer(strict)
    both = own.keys() & base.keys()
    repeats, prompts = {repeat for repeat, _ in both}, sorted({prompt for _, prompt in both})
    prompts = [name for name in prompts if all((repeat, name) in both for repeat in repeats)]
    if not prompts:
        return Measured(row, strict)
    # [this and strict, repeats, prompts, what is known]
    values = np.array([[[of[r, p] for p in prompts] for r in repeats] for of in (own, base)])
    count = len(prompts)
    # How often each sample holds each prompt; the first, once: it is the estimate itself.
    drawn = (np.bincount(sample, minlength=count) for sample in resamples(count))
    draws = np.vstack([np.ones(count, int), *drawn])
    mine, theirs = np.einsum("srpk,dp->skrd", values, draws)
    samples = {
        "tokens_per_second": mine[TOKENS] / mine[CLOCK],
        "speedup": mine[TOKENS] / mine[CLOCK] / (theirs[TOKENS] / theirs[CLOCK]),
        "seconds": mine[SECONDS] / count,
        "sooner": theirs[SECONDS] / mine[SECONDS],
        "length": mine[TOKENS] / count,
    }
    if not row.key.temperature:
        samples["loss"] = mine[COST] / mine[TOKENS] - theirs[COST] / theirs[TOKENS]
    found = {name: _interval(of) for name, of in samples.items()}
    # [this and strict, prompts]
    ttft, tpot = (np.median(values[..., what], axis=1) for what in (TTFT, TPOT))
    found |= {
        "ttft": _median(ttft[0]),
        "tpot": _median(tpot[0]),
        "faster": _median(tpot[1] / tpot[0]),
    }
    return Measured(row, strict, **found)


def by_answer(row: Row) -> dict[tuple[int, str], list[float]]:
    """What is known of the answer to each prompt in each repeat, NaN what is not."""
    found: dict[tuple[int, str], list[list[float]]] = {}
    for cell in row.cells:
        costs = {
            prompt.prompt_id: sum(token.loss for token in prompt.off_choice)
            for prompt in (cell.quality.prompts if cell.quality else ())
            # Without it the target was not asked.
            if "nll" in prompt.scores
        }
        # An answer that ended at once lost nothing.
        costs |= {it.prompt_id: 0.0 for it in cell.outputs if costs and not it.text}
        outputs = [output for output in cell.outputs if not output.error]
        total = sum(output.seconds for output in outputs)
        for output in outputs:
            assert cell.speed is not None, "a cell with outputs has a speed"
            # Requests that run at once share the cell's time.
            clock = cell.speed.seconds * output.seconds / total
            cost = costs.get(output.prompt_id, np.nan)
            first, further = output.first_token_seconds, output.output_tokens - 1
            tpot = (output.seconds - first) / further if further > 0 else np.nan
            known = [float(output.output_tokens), clock, output.seconds, cost, first, tpot]
            found.setdefault((cell.key.repeat, output.prompt_id), []).append(known)
    return {key: np.mean(answers, axis=0).tolist() for key, answers in found.items()}


def _median(values: Any) -> Interval | None:
    """Of `[prompts]`, without those whose figure is not known."""
    known = values[~np.isnan(values)]
    return Interval(*median(known)) if len(known) else None


def _interval(samples: Any) -> Interval | None:
    """Of `[repeats, samples]`, whose first sample is the estimate."""
    medians = np.median(samples, axis=0)
    if np.isnan(medians).any():
        return None
    return Interval(float(medians[0]), *interval(medians[1:]))
