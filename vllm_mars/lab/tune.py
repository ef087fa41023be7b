"""`vllm-mars tune`: which speculative config to serve, as a sweep that drops what is slow.

Candidates are strict verification, the same with probabilistic drafts, and MARS with a bound, each
at several numbers of draft tokens K, beside no drafts; on a GPU also with vLLM's adaptive
verification, if the drafts are a model's. Rounds of one block of prompts each drop the
slower half at each temperature and load. What is left is put together, K by load, for each
temperature and for all of them, and measured on prompts that the choice has not seen, beside no
drafts and beside strict verification at its best.

Both tell seconds per token of whole answers, because how long a sampled answer gets is luck; how
long answers are stands beside it.
"""

import itertools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mars.lab import sweep_command
from vllm_mars.lab.plan import METHODS, STANDARD, STRICT, SweepOptions, Turn, load_sweep
from vllm_mars.lab.records import Record, SweepFile
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.drafts import NGRAM, RECOMMENDED, draft_config, drafts_of
from vllm_mars.servers.provenance import describe_run, vllm_device

if TYPE_CHECKING:
    from vllm_mars.lab.rows import Text

NEEDED = sweep_command.NEEDED
NO_DRAFTS, DRAWN, MARS = "no drafts", "strict, probabilistic", "MARS"
ADAPTIVE = "adaptive"
TUNED, BEST_STRICT, FOR_ALL = "tuned", "strict at its best", "for all"
# Of the sweep: three servers at a time take turns.
DEFAULTS: dict[str, Any] = {
    **{"methods": (), "cells": (f"{NO_DRAFTS}=null",), "block": 4, "side_by_side": 3},
    **{"temperatures": (0.0, 1.0), "concurrencies": (1, 4, 16)},
}
# Of the minutes, for the choice; the rest is for the comparison.
CHOOSING = 0.5
# Candidates of a point that are left when the choice ends.
FEW = 3
# Half the width of an interval that is narrow enough.
NARROW = 0.05

# A temperature and a load.
Point = tuple[float, int]
# A family and K.
Candidate = tuple[str, int]
Paces = dict[tuple[str, Point], float]
# The family and the speculative config, None for no drafts, of each rule at each temperature.
Served = dict[tuple[str, float], tuple[str, dict[str, Any] | None]]


def families_of(
    draft: str, max_loss: float, *, samples: bool, on_cpu: bool
) -> dict[str, dict[str, Any]]:
    """What is compared, each without K."""
    drafts, (fixed, drawn) = draft_config(draft), drafts_of(draft)
    # vLLM's own server samples wrong tokens on a CPU; MARS at price 0 is the same.
    strict = drafts | (METHODS[STRICT if on_cpu and samples else STANDARD] or {})
    found = {STRICT: strict | fixed, MARS: drafts | RECOMMENDED | {"mars_max_loss": max_loss}}
    if drawn and samples:
        found[DRAWN] = strict | drawn
    if drawn and not on_cpu:
        # vLLM's estimator reads the logits of a draft model; a server that it refuses drops out.
        cut = {"enable_adaptive_verification": True}
        best = DRAWN if samples else STRICT
        found |= {f"{name}, {ADAPTIVE}": found[name] | cut for name in (best, MARS)}
    return found


def by_rule(records: Sequence[Record]) -> dict[tuple[str, Point], list[Record]]:
    """The records of each rule at each point."""
    found: dict[tuple[str, Point], list[Record]] = {}
    for it in records:
        found.setdefault((it.name, (it.temperature, it.concurrency)), []).append(it)
    return found


def paces(records: Sequence[Record]) -> Paces:
    """Seconds per token of whole answers, by rule and point."""
    from vllm_mars.lab.rows import pace

    known = {key: pace(those) for key, those in by_rule(records).items()}
    return {key: it.value for key, it in known.items() if it}


def named(candidate: Candidate) -> str:
    """The name of a candidate's rule."""
    return f"{candidate[0]}, K {candidate[1]}"


def faster_half(left: Sequence[Candidate], point: Point, found: Paces) -> list[Candidate]:
    """The candidates of a point that stay after a round; one that failed goes."""
    order = sorted(left, key=lambda it: found.get((named(it), point), math.inf))
    return [it for it in order[: -(-len(order) // 2)] if (named(it), point) in found]


def put_together(
    left: Mapping[Point, Sequence[Candidate]], found: Paces, families: Iterable[str]
) -> tuple[str, dict[int, int]]:
    """The family that gains most over no drafts, and its K by load, 0 where no drafts are faster.

    Args:
        left: the candidates of each point.
        found: how fast they are, and no drafts.
        families: of which to choose.
    """

    def gain(family: str, k: int, points: Sequence[Point]) -> float:
        """Of all points, in logarithms; what was dropped was slower than it looks."""
        names = [(named((family, k)), point) for point in points]
        if not k or not all(name in found for name in names):
            return -math.inf if k else 0.0
        return sum(math.log(found[NO_DRAFTS, it[1]] / found[it]) for it in names)

    gained: dict[str, float] = {}
    lengths: dict[str, dict[int, int]] = {}
    for family in families:
        gained[family], lengths[family] = 0.0, {}
        for load in sorted({load for _, load in left}):
            points = [point for point in left if point[1] == load]
            ks = {0, *(k for point in points for own, k in left[point] if own == family)}
            gains = {k: gain(family, k, points) for k in sorted(ks)}
            lengths[family][load] = max(gains, key=lambda k: gains[k])
            gained[family] += max(gains.values())
    best = max(gained, key=lambda family: gained[family])
    return best, lengths[best]


def by_load(config: Mapping[str, Any], lengths: Mapping[int, int]) -> dict[str, Any] | None:
    """vLLM's speculative config with K by the number of requests; None for no drafts."""
    if not any(lengths.values()):
        return None
    found = {**config, "num_speculative_tokens": max(lengths.values())}
    if len(set(lengths.values())) > 1:
        loads, begin, schedule = sorted(lengths), 1, []
        for load, following in zip(loads, [*loads[1:], None], strict=True):
            # Up to halfway, in factors, to the next load that was measured.
            end = load if following is None else math.isqrt(load * following)
            schedule.append([begin, max(end, begin), lengths[load]])
            begin = schedule[-1][1] + 1
        found["num_speculative_tokens_per_batch_size"] = schedule
    return found


def settings(
    left: Mapping[Point, Sequence[Candidate]], found: Paces, families: Mapping[str, dict[str, Any]]
) -> Served:
    """What is best at each temperature: of strict verification, of all, and one for all of them."""
    served: Served = {}
    for temperature in sorted({temperature for temperature, _ in left}):
        here = {point: those for point, those in left.items() if point[0] == temperature}
        strict = [it for it in families if not it.startswith(MARS)]
        for name, at, of in (
            (BEST_STRICT, here, strict), (TUNED, here, families), (FOR_ALL, left, families)
        ):  # fmt: skip
            family, lengths = put_together(at, found, of)
            config = by_load(families[family], lengths)
            served[name, temperature] = (family if config else NO_DRAFTS), config
    return served


def rules(served: Served) -> list[str]:
    """What is compared: no drafts, and each setting of a temperature once, by its first name."""
    found: dict[str, str] = {}
    for (name, temperature), (_, config) in served.items():
        if config:
            found.setdefault(json.dumps({**config, "temperature": temperature}), name)
    return [f"{NO_DRAFTS}=null", *(f"{name}={config}" for config, name in found.items())]


def tune(
    sweep: SweepOptions,
    families: Mapping[str, dict[str, Any]],
    lengths: Iterable[int],
    output: Path,
    *,
    minutes: float,
    anew: bool = False,
) -> tuple[Served, SweepFile]:
    """Measures what the file lacks, and chooses.

    Args:
        sweep: without its rules.
        families, lengths: of which each pair is a candidate.

    Returns:
        What was chosen, and of the file the comparison at the end.

    Raises:
        ValueError, RuntimeError: as `run_sweep`, or nothing answered.
    """
    from vllm_mars.lab.sweep import run_sweep

    every = list(itertools.product(families, lengths))
    cells = (
        f"{named((of, k))}={json.dumps({**families[of], 'num_speculative_tokens': k})}"
        for of, k in every
    )
    sweep = replace(sweep, cells=(f"{NO_DRAFTS}=null", *cells))
    num_blocks = -(-len(load_sweep(sweep).prompts) // sweep.block)
    left = {(t, load): list(every) for t in sweep.temperatures for load in sweep.concurrencies}
    block = 0
    while max(map(len, left.values())) > FEW or not block:
        names = {(named(it), point) for point, those in left.items() for it in those}
        now = {(block, *it) for it in names | {(NO_DRAFTS, point) for point in left}}
        file = run_sweep(sweep, output, anew=anew and not block, only=_among(now))
        # A file that an earlier call left also holds its comparison, in later blocks.
        seen = [it for it in file.records if it.block <= block]
        found = paces(seen)
        left = {point: faster_half(those, point, found) for point, those in left.items()}
        block += 1
        if _minutes(seen) > CHOOSING * minutes or block + 1 >= num_blocks:
            break
    if any((NO_DRAFTS, point) not in found for point in left):
        reasons = (it.reason for it in file.records if not it.measured)
        raise RuntimeError(f"no drafts: {next(reasons, 'nothing was measured')}")
    served = settings(left, found, families)
    last = replace(sweep, cells=tuple(rules(served)))
    compared = {(it.name, (it.temperature, it.concurrency)) for it in last.all_cells()}
    each = _minutes(seen) / len(seen) * len(compared)
    blocks = max(1, min(num_blocks - block, int((minutes - _minutes(seen)) / each)))
    file = run_sweep(last, output, only=lambda turn: block <= turn.block < block + blocks)
    later = by_rule([it for it in file.records if it.block >= block])
    return served, replace(
        file, records=[it for key in later if key in compared for it in later[key]]
    )


def _among(due: Collection[tuple[int, str, Point]]) -> Callable[[Turn], bool]:
    return lambda turn: (turn.block, turn.cell.name, turn.cell[2:]) in due


def _minutes(records: Sequence[Record]) -> float:
    return sum(it.measured.seconds for it in records if it.measured) / 60


def told(served: Served, file: SweepFile) -> tuple[list[str], "Text"]:
    """The sentences of a choice, and the table of its comparison."""
    from vllm_mars.lab.rows import Text, heat, pace, shown

    records, body, widest, prompts = by_rule(file.records), [], 0.0, set()
    for (name, point), own in sorted(records.items(), key=lambda item: item[0][1]):
        answers = [it for record in own if record.measured for it in record.measured.answers]
        prompts |= {it.prompt for it in answers}
        length = sum(it.tokens for it in answers) / max(len(answers), 1)
        body.append([heat(point[0]), f"{point[1]}", name])
        for other in (NO_DRAFTS, BEST_STRICT):
            base = records.get((other, point), own)
            ratio = None if base is own or name == NO_DRAFTS else pace(own, base)
            if ratio:
                widest = max(widest, (ratio.high - ratio.low) / 2 / ratio.value)
            is_even = ratio and ratio.low <= 1 <= ratio.high
            body[-1].append(shown(ratio, ".2f") + (", no difference shown" if is_even else ""))
        body[-1] += [shown(pace(own), ".1f", 1000, ends=False), f"{length:.1f}"]
    titles = ["requests", "at a time", "rule", *(f"x {of}" for of in (NO_DRAFTS, BEST_STRICT))]
    table = Text("tokens per second of whole answers", [*titles, "ms per token", "tokens"], body)
    lines = []
    for (name, temperature), (family, config) in served.items():
        flag = f"--speculative-config '{json.dumps(config)}'" if config else "no such option"
        if name == TUNED:
            lines.append(f"{heat(temperature)}: {family}, {flag}")
            if config and config == served[BEST_STRICT, temperature][1]:
                lines.append("That is strict verification at its best, so it was measured once.")
    if len({temperature for _, temperature in served}) > 1:
        # The last rule, the same at each temperature.
        lines.append(f"A server has one setting; over all of these requests: {family}, {flag}")
    if math.isinf(widest):
        lines.append("One block of prompts tells no interval; give more --minutes or --prompts.")
    elif widest > NARROW:
        times = (widest / NARROW) ** 2
        lines.append(
            f"Intervals are up to ±{widest:.0%}. For ±{NARROW:.0%} the comparison, half of "
            f"--minutes, takes {times * _minutes(file.records):.0f} minutes, and "
            f"{times * len(prompts):.0f} prompts beside those that choose."
        )
    return lines, table


def add_parser(commands: Any) -> None:
    """Adds the command to `vllm-mars`."""
    parser = commands.add_parser(
        "tune",
        help="find the speculative config to serve, at each load",
        description="Measures no drafts, strict verification and MARS at several K on real servers "
        "with your prompts, drops what is slow, and prints a --speculative-config for each "
        "temperature, and one for all, beside no drafts and strict verification at its best. "
        "Called again it goes on.",
    )
    add = parser.add_argument
    add("--model", metavar="MODEL", help="default: the packaged model with its EAGLE-3 head")
    add("--draft", metavar="DRAFT",
        help="ngram, suffix, mtp, or the directory or name of a draft model or head; default "
        "ngram, for the packaged model its head")  # fmt: skip
    add("--prompts", nargs="+", metavar="FILE", help="JSON lines with 'prompt', in random order")
    add("--temperature", dest="temperatures", nargs="+", type=float, metavar="T",
        help="that your requests have; default 0 1")  # fmt: skip
    add("--concurrency", dest="concurrencies", nargs="+", type=int, metavar="N",
        help="requests at a time; default 1 4 16")  # fmt: skip
    add("--num-speculative-tokens", nargs="+", type=int, metavar="K", help="default 1 2 3 5")
    add("--max-loss", type=float, metavar="NATS", help="mars_max_loss; default 0.02")
    add("--minutes", type=float, help="of requests; servers' starts come on top; default 20")
    add("--max-tokens", type=int, metavar="N", help="longest answer; default 1024")
    add("--side-by-side", type=int, metavar="N",
        help="servers at a time, which share the GPU's memory; default 3")  # fmt: skip
    add("--output", type=Path, metavar="FILE", default=Path("build/tune.jsonl"),
        help="default build/tune.jsonl; the choice goes beside it as .json")  # fmt: skip
    sweep_command.add_shared(add)


def run(
    output: Path,
    anew: bool,
    draft: str | None = None,
    num_speculative_tokens: tuple[int, ...] = (1, 2, 3, 5),
    max_loss: float = RECOMMENDED["mars_max_loss"],
    minutes: float = 20.0,
    **given: Any,
) -> int:
    """Runs the command.

    Returns:
        0, or 1 where a turn of the comparison failed.
    """
    draft = draft or (str(PACKAGED_HEAD) if given.get("model") is None else NGRAM)
    sweep = SweepOptions(**DEFAULTS | given)
    on_cpu = vllm_device()[0] == "cpu"
    families = families_of(draft, max_loss, samples=any(sweep.temperatures), on_cpu=on_cpu)
    served, file = tune(sweep, families, num_speculative_tokens, output, minutes=minutes, anew=anew)
    lines, table = told(served, file)
    sweep_command.show([table])
    print(*lines, sep="\n")
    chosen = [
        {"rule": name, "temperature": temperature, "family": family, "speculative_config": config}
        for (name, temperature), (family, config) in served.items()
    ]
    content = {"chosen": chosen, "told": lines, "file": output.name, **describe_run(None)}
    output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    failed = [record for record in file.records if record.measured is None]
    for record in failed:
        print(f"{record.name}: failed: {record.problem}", file=sys.stderr)
    return int(bool(failed))
