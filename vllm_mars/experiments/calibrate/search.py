"""Finds the loosest threshold whose loss stays within a budget, for one model and draft.

1. One strict pass over half of the prompts records the target's two largest logits and the draft's
   wherever a draft is verified. From that alone every threshold is simulated, and what its relaxed
   tokens cost predicted: the mean over all tokens of log p(target's first choice) - log p(token),
   in nats.
2. The other half is answered strictly and with the loosest threshold whose predicted cost is within
   the budget. Two things must be within it there: that cost as it turns out, and the increase of
   the answers' mean negative log-likelihood (NLL) per token over the strict answers. The second
   also sees where a relaxed token leads, and is noisy, since the texts part ways. If one of them is
   not, the next try may only spend `SHRINK` of the predicted cost, until one is kept, or none is
   left but strict.

With a share of a task's score to keep (`recovery`) instead of a budget in nats, nothing about the
loss can be predicted: the other half, then tasks, is answered strictly and with thresholds between
which the search halves the curve, as if a stricter one never lost more.

"Within the budget" means in at least `simulate.CONFIDENCE` of the bootstrap samples over
prompts.
"""

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_mars.calibration import KIND, SCHEMA, draft_facts
from vllm_mars.config import OPTION, STRICT
from vllm_mars.experiments.calibrate.losses import Confirmation, compare, recovery, scores
from vllm_mars.experiments.calibrate.offline import OfflineEngine, offline_engine
from vllm_mars.experiments.calibrate.options import CalibrateOptions
from vllm_mars.experiments.calibrate.simulate import (
    BOOTSTRAP_SAMPLES,
    GRIDS,
    Point,
    margins,
    point,
    steps_of,
)
from vllm_mars.experiments.sweep.datasets import Item, load_dataset
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.prompts import Prompt, load_prompts
from vllm_mars.local.provenance import describe_run, vllm_device
from vllm_mars.local.result_file import require_writable, write_json

SHRINK = 0.7
MAX_TRIES = 8


@dataclass
class Calibration:
    """Everything measured, and the threshold that came out.

    Attributes:
        run: `describe_run`.
        model: `identify`.
        samples: how many prompts, tokens and positions it rests on, as the file has them; of the
            held-out tasks "solved_prompts" are those for which strict decoding scores anything.
        margins: as `simulate.margins`.
    """

    options: CalibrateOptions
    run: dict[str, Any]
    model: dict[str, Any]
    samples: dict[str, int | None]
    curve: list[Point]
    margins: dict[str, Any]
    confirmations: list[Confirmation] = field(default_factory=list)
    threshold: float = 1.0

    @property
    def confirmed(self) -> Confirmation | None:
        """The try that the threshold comes from; None where only strict keeps the budget."""
        return next(
            (t for t in self.confirmations if t.kept and t.threshold == self.threshold), None
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the file's content (docs/calibration.md)."""
        options = self.options
        confirmed = self.confirmed
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "metric": options.metric,
            "threshold": self.threshold,
            "budget": options.budget if options.recovery is None else None,
            "recovery": options.recovery,
            "budget_kept_share": confirmed.kept_share if confirmed else 1.0,
            "model": self.model,
            "draft": draft_facts(options.speculative_config()),
            **self.run,
            "config": {
                "prompts": options.prompts.name,
                "max_tokens": options.max_tokens,
                "temperature": 0,
                "engine_args": list(options.engine_args),
                "bootstrap_samples": BOOTSTRAP_SAMPLES,
            },
            "samples": self.samples,
            "curve": [vars(point) for point in self.curve],
            "confirmations": [
                {**dataclasses.asdict(item), "kept": item.kept} for item in self.confirmations
            ],
            "margins": self.margins,
        }


def run_calibrate(options: CalibrateOptions) -> Calibration:
    """Calibrates and writes the file.

    Raises:
        ValueError: the prompts cannot be read, are fewer than two, gave no drafts, are no tasks
            where `recovery` needs them, or too few of the held-out ones are done strictly.
        RuntimeError: the model cannot be made, or vLLM failed.
    """
    from rich.console import Console

    console = Console(stderr=True)
    tasks: dict[str, Item] = {}
    if options.recovery is None:
        prompts = load_prompts(options.prompts)
    else:
        tasks = load_tasks(options.prompts)
        prompts = [Prompt(task.id, task.category, (task.prompt,)) for task in tasks.values()]
    if len(prompts) < 2:
        raise ValueError(
            f"prompts={options.prompts} holds one prompt; two or more are needed, since every "
            "second one is held out."
        )
    if options.recovery is not None:
        _check_solved(options, len(prompts[1::2]), len(prompts[1::2]), "at most ")
    require_writable(options.output)
    device, gpu = vllm_device()
    model = options.model or str(ensure_model())
    run = describe_run(gpu, model, options.draft)
    with offline_engine(options, model, device) as engine:
        if engine.penalties:
            console.print(
                f"Servers of this model apply {engine.penalties} of its generation_config.json, "
                "which this calibration does not: serve with --generation-config vllm, or expect "
                "another loss.",
                style="bold",
            )
        console.print("recording one strict pass")
        result = record(engine, run, prompts[0::2], len(prompts[1::2]))
        confirm(engine, result, prompts[1::2], tasks, console.print)
    write_json(options.output, result.to_json())
    console.print(f"wrote {options.output}", soft_wrap=True)
    return result


def load_tasks(path: Path) -> dict[str, Item]:
    """Reads a file of tasks, by id, in the order of the file.

    Raises:
        ValueError: the file cannot be read, or a line has nothing to score its answer by.
    """
    if str(path).startswith(("vllm:", "lm-eval:")):
        raise ValueError(
            f"prompts={path} is no file; recovery needs JSON lines with tasks, every second of "
            "which can be held out."
        )
    items = load_dataset(str(path), 0).items
    for item in items:
        if not item.is_task:
            raise ValueError(
                f"prompts={path}: {item.id!r} has nothing to score its answer by, which recovery "
                "needs; add 'answer' with '#### NUMBER', 'test' with 'entry_point', 'schema', "
                "'sql' or 'accepted'."
            )
    return {item.id: item for item in items}


def record(
    engine: OfflineEngine, run: dict[str, Any], prompts: Sequence[Prompt], held_out: int
) -> Calibration:
    """Records one strict pass and simulates the grid of thresholds on it."""
    options = engine.options
    conversations = engine.lead(prompts, STRICT.value(options.metric))
    group_of = {
        request: group
        for group, conversation in enumerate(conversations)
        for request in conversation.requests
    }
    steps = steps_of(engine.take_records(), group_of, engine.protected)
    tokens = np.array([conversation.tokens for conversation in conversations], float)
    return Calibration(
        options=options,
        run=run,
        model=engine.model,
        samples={
            "recorded_prompts": len(prompts),
            "held_out_prompts": held_out,
            "solved_prompts": None,
            "recorded_tokens": int(tokens.sum()),
            "recorded_positions": len(steps.step),
        },
        curve=[point(steps, tokens, value, options.metric) for value in GRIDS[options.metric]],
        margins=margins(steps),
    )


def confirm(
    engine: OfflineEngine,
    result: Calibration,
    prompts: Sequence[Prompt],
    tasks: Mapping[str, Item],
    say: Callable[[str], Any],
) -> None:
    """Tries thresholds on held-out prompts; sets `result.threshold` to the one to serve with.

    Args:
        engine: of the model.
        result: with the predicted curve; takes the tries.
        prompts: the held-out ones.
        tasks: by id, where `recovery` is the budget; else empty.
        say: takes a line of progress.

    Raises:
        ValueError: `recovery` is the budget, and too few strict answers score anything.
    """
    options, wanted = result.options, result.options.recovery
    strict = engine.lead(prompts, STRICT.value(options.metric))
    strict_scores = None if wanted is None else scores(strict, tasks)
    if strict_scores is not None:
        solved = int((strict_scores > 0).sum())
        _check_solved(options, len(prompts), solved)
        result.samples["solved_prompts"] = solved

    def keeps(candidate: Point) -> bool:
        say(f"confirming {OPTION[options.metric]} {candidate.threshold:g} on held-out prompts")
        relaxed = engine.lead(prompts, candidate.threshold)
        confirmation = compare(strict, relaxed, candidate, options.budget)
        if wanted is not None and strict_scores is not None:
            left = recovery(scores(relaxed, tasks), strict_scores, wanted)
            confirmation = dataclasses.replace(confirmation, recovery=left)
        result.confirmations.append(confirmation)
        return confirmation.kept

    curve = result.curve
    if strict_scores is None:
        # Each candidate may spend less than the one before.
        allowed = (options.budget * SHRINK**number for number in range(MAX_TRIES))
        candidates = dict.fromkeys(loosest(curve, nats) for nats in allowed)
        found = next((it for it in candidates if it is curve[-1] or keeps(it)), curve[-1])
    else:
        # As if all that are stricter than one that keeps it did; the last, strict, does.
        found = curve[bisect.bisect_left(curve, True, hi=len(curve) - 1, key=keeps)]
    result.threshold = found.threshold


def _check_solved(options: CalibrateOptions, held_out: int, solved: int, at_most: str = "") -> None:
    if solved < options.min_solved:
        raise ValueError(
            f"prompts={options.prompts}: strict decoding solves {at_most}{solved} of the "
            f"{held_out} held-out tasks; fewer than min_solved={options.min_solved} cannot show "
            "what is kept: give more tasks that this model can solve, or lower --min-solved."
        )


def loosest(curve: Sequence[Point], allowed: float) -> Point:
    """The first point, of a curve from loose to strict, after which all stay within `allowed`."""
    found = curve[-1]
    for candidate in reversed(curve):
        if candidate.high > allowed:
            break
        found = candidate
    return found
