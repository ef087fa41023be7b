"""The report's tables, and the answers with their relaxed tokens."""

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_mars.calibration import OPTION
from vllm_mars.experiments.quality.scores import is_task_score
from vllm_mars.experiments.sweep.records import Cell, Estimate, OffChoice
from vllm_mars.experiments.sweep.summary import Row

Calibrations = Sequence[tuple[str, dict[str, Any]]]

MAX_ANSWERS, MAX_OF_RULE = 6, 2
_NAMES = {
    "nll": "NLL per token, nats",
    "exact_match": "exact match",
    "pass_at_1": "pass@1",
    "json_valid": "valid JSON",
    "rouge_l": "ROUGE-L to autoregressive",
    "chrf": "chrF to autoregressive",
    "agreement": "same text as autoregressive",
}


@dataclass(frozen=True)
class Table:
    """A table; the first `words` columns are words, the others numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


@dataclass(frozen=True)
class Piece:
    """A part of an answer: text that is the target's own, or one relaxed token.

    Attributes:
        text: of the answer.
        choice: the target's first choice instead; None where the text is that.
        probability, choice_probability: of both under the target.
    """

    text: str
    choice: str | None = None
    probability: float = 1.0
    choice_probability: float = 1.0


@dataclass(frozen=True)
class Relaxed:
    """One answer with its relaxed tokens.

    Attributes:
        title: rule and prompt.
        pieces: the answer, in order.
        count: its relaxed tokens.
    """

    title: str
    pieces: Sequence[Piece]
    count: int


def speed_table(found: Sequence[Row]) -> list[Table]:
    """Speed and acceptance of every rule at every point."""
    head = ("rule", "draft", "dataset", "T", "requests", "tokens/s", "x autoregr.", "x standard")
    more = ("accepted length", "tokens/answer", "s/answer", "repeats")
    body = []
    for row in found:
        key = row.key
        if not row.cells:
            continue
        body.append(
            [
                *(key.rule, f"{key.draft} K{key.k}" if key.k else "", key.dataset),
                *(f"{key.temperature:g}", f"{key.concurrency}"),
                _number(row.tokens_per_second, ".1f"),
                *(_number(value, ".2f") for value in (row.speedup, row.over_standard)),
                _number(row.acceptance_length, ".2f"),
                *(
                    _mean(row, name, form)
                    for name, form in (("output_tokens", ".1f"), ("seconds", ".2f"))
                ),
                str(len(row.cells)),
            ]
        )
    return [Table("Speed: medians over the repeats", (*head, *more), body, words=3)] if body else []


def quality_table(found: Sequence[Row]) -> list[Table]:
    """Every judged score of every rule."""
    body = []
    for row in found:
        for estimate in row.estimates:
            if estimate.name in _NAMES or is_task_score(estimate.name):
                key = row.key
                score = _NAMES.get(estimate.name, estimate.name)
                body.append(
                    [
                        *(key.rule, f"{key.draft} K{key.k}" if key.k else "", key.dataset),
                        *(score, f"{key.temperature:g}", f"{key.concurrency}"),
                        _interval(estimate.value, estimate.low, estimate.high),
                        _interval(
                            estimate.difference,
                            estimate.difference_low,
                            estimate.difference_high,
                            "+.3f",
                        ),
                        _interval(estimate.recovery, estimate.recovery_low, estimate.recovery_high),
                        *(_verdict(estimate), str(estimate.samples)),
                    ]
                )
    head = ("rule", "draft", "dataset", "score", "T", "requests", "mean")
    more = ("minus autoregr.", "recovery", "non-inferior", "prompts")
    title = "Quality: means with their 95 % intervals"
    return [Table(title, (*head, *more), body, words=4)] if body else []


def unmeasured_table(cells: Iterable[Cell]) -> list[Table]:
    """Cells that failed or that this vLLM or platform cannot measure."""
    body = [[cell.key.label, cell.status, cell.reason] for cell in cells if cell.status != "ok"]
    return [Table("Not measured", ("cell", "status", "reason"), body, words=3)] if body else []


def provenance_table(cells: Iterable[Cell], calibrations: Calibrations) -> list[Table]:
    """Commit, versions, hardware and command of each sweep and calibration, each once."""
    body: dict[tuple[str, ...], None] = {}
    for cell in cells:
        body[_origin("sweep", vars(cell))] = None
    for name, content in calibrations:
        body[_origin(f"calibration {name}", content)] = None
    head = ("run", "commit", "versions", "hardware", "command")
    return [Table("Runs", head, list(body), words=len(head))] if body else []


def calibration_table(calibrations: Calibrations) -> list[Table]:
    """What each calibration tried on held-out prompts."""
    body = []
    for name, content in calibrations:
        samples = content.get("samples", {})
        for item in content.get("confirmations", []):
            cost, nll, left = item["cost"], item["nll_increase"], item.get("recovery")
            deciding = [cost, nll] if left is None else [left]
            body.append(
                [
                    *(name, f"{OPTION[content['metric']]} {item['threshold']:g}"),
                    *(_budget(content), f"{item['predicted']:.4f}"),
                    _interval(cost["value"], cost["low"], cost["high"], ".4f"),
                    _interval(nll["value"], nll["low"], nll["high"], "+.4f"),
                    _interval(left["value"], left["low"], left["high"]) if left else "",
                    f"{min(measure['kept_share'] for measure in deciding):.0%}",
                    *("yes" if item["kept"] else "no", str(samples.get("held_out_prompts", ""))),
                ]
            )
    head = ("calibration", "threshold", "budget", "predicted cost", "cost", "NLL increase")
    more = ("recovery", "samples within", "kept", "prompts")
    title = "Calibration on held-out prompts: nats per token, with their 95 % intervals"
    return [Table(title, (*head, *more), body, words=2)] if body else []


def _budget(calibration: dict[str, Any]) -> str:
    if calibration["budget"] is not None:
        return f"{calibration['budget']:g}"
    return f"recovery {calibration['recovery']:g}"


def relaxed_answers(cells: Iterable[Cell]) -> list[Relaxed]:
    """Greedy answers of lossy rules with relaxed tokens: the richest, of different prompts."""
    candidates = []
    for cell in cells:
        if cell.key.temperature or not cell.key.lossy or cell.quality is None:
            continue
        texts = {output.prompt_id: output.text for output in cell.outputs}
        for prompt in cell.quality.prompts:
            if prompt.off_choice and prompt.prompt_id in texts:
                candidates.append((cell.key, prompt, texts[prompt.prompt_id]))
    candidates.sort(key=lambda item: -len(item[1].off_choice))
    chosen: dict[str, Relaxed] = {}
    rules: dict[str, int] = {}
    for key, prompt, text in candidates:
        if prompt.prompt_id in chosen or rules.get(key.rule, 0) == MAX_OF_RULE:
            continue
        rules[key.rule] = rules.get(key.rule, 0) + 1
        chosen[prompt.prompt_id] = Relaxed(
            f"{key.rule}, {key.draft} K{key.k}: {prompt.prompt_id}",
            pieces(text, prompt.off_choice),
            len(prompt.off_choice),
        )
        if len(chosen) == MAX_ANSWERS:
            break
    return list(chosen.values())


def pieces(text: str, off_choice: Sequence[OffChoice]) -> list[Piece]:
    """Cuts an answer at its relaxed tokens."""
    found, end = [], 0
    for token in sorted(off_choice, key=lambda token: token.start):
        if token.start < end:
            # Two tokens of one character, such as the bytes of an emoji.
            continue
        if token.start > end:
            found.append(Piece(text[end : token.start]))
        end = max(token.end, token.start)
        found.append(
            Piece(
                text[token.start : end],
                token.best_text,
                math.exp(token.logprob),
                math.exp(token.best_logprob),
            )
        )
    return [*found, Piece(text[end:])] if end < len(text) else found


def _origin(run: str, content: dict[str, Any]) -> tuple[str, ...]:
    def words(values: dict[str, Any] | None) -> str:
        return ", ".join(f"{name} {value}" for name, value in (values or {}).items() if value)

    return (
        run,
        (content.get("git_commit") or "")[:18],
        words(content.get("versions")),
        words(content.get("hardware")),
        shlex.join(content.get("command", [])),
    )


def _verdict(estimate: Estimate) -> str:
    if estimate.non_inferior is None:
        return ""
    verdict = "yes" if estimate.non_inferior else "not shown"
    return f"{verdict} (margin {estimate.margin:.3g}, p {estimate.p_value:.3f})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _interval(value: float | None, low: float | None, high: float | None, form: str = ".3f") -> str:
    if value is None:
        return ""
    if low is None or high is None:
        return format(value, form)
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def _mean(row: Row, name: str, form: str) -> str:
    found = row.estimate(name)
    return _number(found.value if found else None, form)
