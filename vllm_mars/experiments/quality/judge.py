"""Quality of measured cells, beside the autoregressive cell on the same prompts."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_mars.experiments.metrics import METRICS
from vllm_mars.experiments.quality.confined import confinement
from vllm_mars.experiments.quality.intervals import estimate
from vllm_mars.experiments.quality.scores import (
    divergence,
    is_task_score,
    likeness,
    repeated_4grams,
    task_scores,
)
from vllm_mars.experiments.quality.target_scores import Scored, TargetScorer
from vllm_mars.experiments.sweep.datasets import Dataset, Item
from vllm_mars.experiments.sweep.records import (
    Cell,
    CellKey,
    Estimate,
    Output,
    PromptQuality,
    Quality,
    TaskAnswer,
)

# Scores that compare with the autoregressive answer already.
COMPARISONS = (
    *("rouge_l", "chrf", "agreement", "common_prefix", "first_divergence"),
    *("identity", "divergence_gap"),
)
LOWER_IS_BETTER = ("nll", "loss", "repeated_4grams", "seconds", "output_tokens")
# Prompts from which it is measured how far batching moves the target's logits.
ROUNDING_PROMPTS = 16
NO_REFERENCE = "No autoregressive cell with these prompts and this temperature was measured."

Scores = dict[str, dict[str, float]]


class Judge:
    """Scores answers, each different one once.

    What a cell's answers are worth follows from their texts: the judge can run long after the
    cells were measured.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        *,
        margin: float,
        nll_margin: float,
        scorer: TargetScorer | None,
    ) -> None:
        """Takes the prompts, margins as for `estimates`, and the target; None leaves it out."""
        self._items = {(d.name, item.id): item for d in datasets for item in d.items}
        self._margin = margin
        self._nll_margin = nll_margin
        self._scorer = scorer
        self._target: dict[tuple[str, str], Scored] = {}
        self._tasks: dict[tuple[str, str, str], dict[str, float]] = {}

    def judge(self, cells: Iterable[Cell]) -> Iterator[tuple[CellKey, Quality]]:
        """Yields the quality of each cell that is `unjudged`.

        Args:
            cells: of one file and one target, autoregressive ones included.

        Raises:
            RuntimeError: the target's server fails, or a prompt's JSON schema is wrong.
        """
        measured = [cell for cell in cells if cell.status == "ok"]
        for cell in unjudged(measured):
            reference, twin = (of(cell.key, measured) for of in (reference_cell, strict_twin))
            self._ask_target(other for other in (cell, reference, twin) if other is not None)
            own = answers(cell)
            scores = {name: self._scores(cell, answer) for name, answer in own.items()}
            beside: Scores | None = None
            if reference is not None and reference.key != cell.key:
                theirs = answers(reference)
                beside = {name: self._scores(reference, it) for name, it in theirs.items()}
                for name in own.keys() & theirs.keys():
                    scores[name] |= self._likeness(own[name].text, theirs[name].text)
            notes = list(self._notes(cell, reference))
            if self._scorer is not None and twin is not None:
                for name, other in answers(twin).items():
                    if name in own and not hides_thoughts(cell) and self._item(cell, name):
                        scores[name] |= self._identity(cell, own[name], other)
            if any("divergence_gap" in values for values in scores.values()):
                notes.append(
                    "A difference counts as none where the target's two largest logits are within "
                    f"{self._rounding:.2g} nats, as far as batching moves them."
                )
            prompts = []
            for name, values in scores.items():
                scored = self._scored(cell, own[name])
                prompts.append(PromptQuality(name, values, scored.off_choice if scored else ()))
            found = estimates(scores, beside, self._margin, self._nll_margin)
            yield cell.key, Quality(tuple(prompts), tuple(found), tuple(notes))

    def _item(self, cell: Cell, prompt_id: str) -> Item | None:
        return self._items.get((cell.key.dataset, prompt_id))

    def _ask_target(self, cells: Iterable[Cell]) -> None:
        """Asks the target about the answers that it has not been asked about."""
        if self._scorer is not None:
            pairs = (
                (item.prompt, output.text)
                for cell in cells
                if not hides_thoughts(cell)
                for output in answers(cell).values()
                if output.text and (item := self._item(cell, output.prompt_id)) is not None
            )
            self._target |= self._scorer.score_all(it for it in pairs if it not in self._target)

    def _scored(self, cell: Cell, output: Output | TaskAnswer) -> Scored | None:
        item = self._item(cell, output.prompt_id)
        return self._target.get((item.prompt, output.text)) if item else None

    def _scores(self, cell: Cell, answer: Output | TaskAnswer) -> dict[str, float]:
        """The scores of an answer that need no other cell."""
        if isinstance(answer, TaskAnswer):
            return dict(answer.scores)
        values = {"seconds": answer.seconds, "output_tokens": float(answer.output_tokens)}
        item = self._item(cell, answer.prompt_id)
        if item is not None:
            key = (cell.key.dataset, answer.prompt_id, answer.text)
            if key not in self._tasks:
                self._tasks[key] = task_scores(item, answer.text)
            values |= self._tasks[key]
        scored = self._scored(cell, answer)
        if scored is not None:
            values["nll"] = scored.nll
            # Where tokens are drawn, another than the first choice is no loss.
            if not cell.key.temperature:
                values["loss"] = scored.loss
        if self._scorer is not None:
            values["repeated_4grams"] = repeated_4grams(self._scorer.token_ids(answer.text))
        return values

    def _likeness(self, text: str, other: str) -> dict[str, float]:
        """The scores that compare with the autoregressive answer."""
        if self._scorer is None:
            return likeness(text, other)
        ids = map(self._scorer.token_ids, (text, other))
        return likeness(text, other) | divergence(*ids)

    def _identity(
        self, cell: Cell, one: Output | TaskAnswer, other: Output | TaskAnswer
    ) -> dict[str, float]:
        """Whether answers to a prompt are equal but for rounding, and the target's gap if not."""
        assert self._scorer is not None, "only with a scorer answers are compared exactly"
        ids = [self._scorer.token_ids(answer.text) for answer in (one, other)]
        first = divergence(*ids).get("first_divergence")
        if first is None:
            return {"identity": 1.0}
        # Where one answer has ended there, the other goes on from the same text.
        scored = self._scored(cell, one if len(ids[0]) > first else other)
        if scored is None or first >= len(scored.gaps):
            # At the end of its context, where it is not asked.
            return {}
        gap = scored.gaps[int(first)]
        return {"identity": float(gap <= self._rounding), "divergence_gap": gap}

    @functools.cached_property
    def _rounding(self) -> float:
        """Nats by which batching moves the target's gaps, measured once an answer differs."""
        assert self._scorer is not None, "without a scorer no difference is found"
        prompts = list(dict.fromkeys(item.prompt for item in self._items.values()))
        return self._scorer.rounding(prompts[:ROUNDING_PROMPTS])

    def _notes(self, cell: Cell, reference: Cell | None) -> Iterable[str]:
        if reference is None:
            yield NO_REFERENCE
        elif reference.key.repeat != cell.key.repeat:
            yield f"Compared with the autoregressive repeat {reference.key.repeat}."
        if reference is not None and reference.key.concurrency != cell.key.concurrency:
            yield f"Compared with concurrency {reference.key.concurrency}."
        if hides_thoughts(cell):
            yield (
                "A reasoning parser kept the thoughts out of the texts, so the target was not "
                "asked about these answers, which depend on them."
            )
        if any(item.test or item.sql for item in self._items.values()):
            yield confinement()
        wrong = [
            output.prompt_id
            for output in answers(cell).values()
            if isinstance(output, Output)
            and (scored := self._scored(cell, output)) is not None
            and scored.prompt_tokens != output.prompt_tokens
        ]
        if wrong:
            yield (
                f"The server's prompt has another length than the judge's at {', '.join(wrong)}: "
                "the NLL there is not under the same prompt."
            )


def answers(cell: Cell) -> dict[str, Output | TaskAnswer]:
    """The cell's answer to each prompt; the first where a prompt was asked more than once."""
    first: dict[str, Output | TaskAnswer] = {one.prompt_id: one for one in cell.task_answers}
    for output in cell.outputs:
        first.setdefault(output.prompt_id, output)
    return first


def unjudged(measured: Sequence[Cell]) -> list[Cell]:
    """The cells whose quality is not known, or for which a reference was measured since."""
    return [
        cell
        for cell in measured
        if cell.quality is None
        or (NO_REFERENCE in cell.quality.notes and reference_cell(cell.key, measured))
    ]


def hides_thoughts(cell: Cell) -> bool:
    """Whether the server kept what the model thought out of the texts."""
    words = (arg.replace("_", "-") for arg in cell.settings.server_args)
    return any(word.startswith("--reasoning-parser") for word in words)


def reference_cell(key: CellKey, measured: Sequence[Cell]) -> Cell | None:
    """The measured autoregressive cell on the same prompts at the same temperature.

    Of several the one of the same concurrency and repeat, else the nearest.
    """

    def distance(cell: Cell) -> tuple[bool, bool, int, int]:
        load, repeat = cell.key.concurrency, cell.key.repeat
        return load != key.concurrency, repeat != key.repeat, load, repeat

    same = (
        cell
        for cell in measured
        if cell.key.method == "autoregressive"
        and (cell.key.model, cell.key.dataset) == (key.model, key.dataset)
        and cell.key.temperature == key.temperature
    )
    return min(same, key=distance, default=None)


def strict_twin(key: CellKey, measured: Sequence[Cell]) -> Cell | None:
    """The measured cell whose answers this one's must be, but for rounding.

    Of a strict rule at temperature 0: for MARS vLLM's "standard" at the same point with the same
    draft and K, else the autoregressive cell. None for any other.
    """
    if key.lossy or key.temperature or key.method == "autoregressive":
        return None
    unset: dict[str, Any] = dict.fromkeys(("metric", "protected", *METRICS.values()))
    same = dataclasses.replace(key, method="standard", options="", **unset)
    standard = next((cell for cell in measured if cell.key == same != key), None)
    return standard or reference_cell(key, measured)


def estimates(
    scores: Mapping[str, Mapping[str, float]],
    reference: Mapping[str, Mapping[str, float]] | None,
    margin: float,
    nll_margin: float,
) -> list[Estimate]:
    """Estimates every score's mean, and its loss beside the reference's.

    Args:
        scores: by prompt, then by name.
        reference: the same of the autoregressive cell; None for that one itself.
        margin: loss of a task score that counts as none, as a share of the reference's mean.
        nll_margin: the same of NLL, in nats per token.
    """
    found = []
    for name in dict.fromkeys(name for values in scores.values() for name in values):
        own = _column(scores, name)
        if reference is None or name in COMPARISONS:
            found.append(estimate(name, own))
            continue
        other = _column(reference, name)
        if not own.keys() & other.keys():
            continue
        limit = None
        if name == "nll":
            limit = nll_margin
        elif is_task_score(name):
            limit = margin * sum(other.values()) / len(other)
        found.append(
            estimate(name, own, other, margin=limit, higher_is_better=name not in LOWER_IS_BETTER)
        )
    return found


def mean_scores(cells: Iterable[Cell]) -> Scores:
    """Each prompt's scores, averaged over judged cells such as the repeats of one rule."""
    collected: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        for prompt in cell.quality.prompts if cell.quality else ():
            for name, value in prompt.scores.items():
                collected.setdefault(prompt.prompt_id, {}).setdefault(name, []).append(value)
    return {
        prompt: {name: sum(values) / len(values) for name, values in by_name.items()}
        for prompt, by_name in collected.items()
    }


def _column(scores: Mapping[str, Mapping[str, float]], name: str) -> dict[str, float]:
    return {prompt: values[name] for prompt, values in scores.items() if name in values}
