"""The page's answer: what to set for a model and draft."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_mars.config import METHOD
from vllm_mars.experiments.columns import at
from vllm_mars.experiments.metrics import OPTION
from vllm_mars.experiments.quality.scores import MIN_SOLVED, is_task_score
from vllm_mars.experiments.sweep.measured import Measured
from vllm_mars.experiments.sweep.records import Estimate, further_options

CANNOT_TELL = "cannot tell"
# Nats per token.
BUDGET = 0.01
SHOWN = (
    f"to lose at most {BUDGET} nats per token and to be faster than strict verification, in tokens "
    "per second and in time per answer (95 % intervals), and of which neither NLL nor a task score "
    "is shown to be worse"
)


@dataclass(frozen=True)
class Answer:
    """What to set.

    Attributes:
        setting: JSON for `--speculative-config`, or that the data does not tell.
        why: by what it was chosen, or what is missing.
        facts: what was measured of it, by name.
        measured: the rule's row, or the least lossy one where none was chosen.
    """

    setting: str
    why: str
    facts: Mapping[str, str]
    measured: Measured | None = None


def fastest_within(point: Iterable[Measured]) -> Answer:
    """Answers by a sweep: the fastest rule that is shown to keep the budget and to be faster."""
    lossy = [
        (it, it.speedup, it.sooner) for it in point if it.row.key.lossy and it.speedup and it.sooner
    ]
    judged = [(it, speedup, sooner, it.loss) for it, speedup, sooner in lossy if it.loss]
    missing = ""
    if not lossy:
        missing = "No lossy rule was timed beside a strict one; `vllm-mars sweep` times both, but "
        missing += "not with tasks of lm-eval."
    elif lossy[0][0].strict is None or not lossy[0][0].strict.key.k:
        missing = "No strict verification was measured beside the lossy rules; `vllm-mars sweep "
        missing += "--method standard mars` measures both."
    elif not judged:
        missing = "No loss was judged; `vllm-mars sweep --temperature 0` judges answers to prompts "
        missing += "of a file, without --no-judge and without a reasoning parser."
    if missing:
        return Answer(CANNOT_TELL, missing, {})
    good = [
        # An answer that is longer has more tokens per second, and a shorter one is done sooner.
        (min(speedup.value, sooner.value), it)
        for it, speedup, sooner, loss in judged
        if loss.high <= BUDGET
        and min(speedup.low, sooner.low) > 1
        and "worse" not in map(conclusion, it.row.estimates)
    ]
    if good:
        _, best = max(good, key=lambda found: found[0])
        key = best.row.key
        further = further_options(key.protected, key.options)
        setting = _setting(key.metric or key.method, key.value, further)
        why = f"The fastest of the lossy rules (here {len(judged)}) that are shown {SHOWN}."
        return Answer(setting, why, _facts(best), best)
    least = min(judged, key=lambda found: found[-1].high)[0]
    why = (
        f"No lossy rule (here {len(judged)}) is shown {SHOWN}. "
        f"The least lossy one, {least.row.key.rule}:"
    )
    return Answer(CANNOT_TELL, why, _facts(least), least)


def _facts(it: Measured) -> dict[str, str]:
    """What a sweep measured of a lossy rule that was timed beside a strict one."""
    assert it.strict is not None, "a speedup is over something"
    speedup, sooner = at("speedup", ".2f")(it), at("sooner", ".2f")(it)
    speed = f"{speedup} x {it.strict.key.rule} in tokens per second, {sooner} x in time per answer"
    facts = {"speed": speed}
    if it.loss:
        facts["loss"] = f"{at('loss', '.4f')(it)} nats per token"
    same, length = map(it.row.estimate, ("agreement", "output_tokens"))
    if same:
        facts["what changes"] = f"{100 - 100 * same.value:.0f} % of {same.samples} answers"
        if length and length.reference:
            lengths = f"; {length.value:.1f} tokens per answer instead of {length.reference:.1f}"
            facts["what changes"] += lengths
    for score in it.row.estimates:
        if is_task_score(score.name) and score.reference is not None:
            facts[score.name.replace("_", " ")] = (
                f"{score.value:.2f} instead of {score.reference:.2f} on {score.samples} tasks: "
                f"{conclusion(score)}"
            )
    return facts


def conclusion(score: Estimate) -> str:
    """What a comparison with autoregressive decoding shows of NLL or a task score.

    Returns:
        "worse"; "equal" (the interval of the difference lies within the margin on both sides: two
        one-sided tests at 2.5 %); "kept" (it is no loss of the margin or more); "not shown"; of
        few solved tasks "cannot tell"; "" where nothing is compared.
    """
    low, high = score.difference_low, score.difference_high
    is_task = is_task_score(score.name)
    if score.reference is None or low is None or high is None:
        return ""
    if not is_task and score.name != "nll":
        return ""
    if is_task and score.reference * score.samples < MIN_SOLVED:
        return CANNOT_TELL
    if high < 0 if is_task else low > 0:
        return "worse"
    if score.margin is not None and -score.margin < low and high < score.margin:
        return "equal"
    return "kept" if score.non_inferior else "not shown"


def _setting(metric: str, threshold: float | None, further: dict[str, Any] | None = None) -> str:
    if metric not in OPTION:
        return json.dumps({"rejection_sample_method": metric})
    options: dict[str, Any] = {"rejection_sample_method": METHOD}
    return json.dumps({**options, OPTION[metric]: threshold, **(further or {})})
