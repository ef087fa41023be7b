"""`vllm-mars tune`: finds the fastest speculative config with a sweep that drops slow candidates.

Candidates are strict verification with fixed and with probabilistic drafts, and MARS with a bound,
each at several numbers of draft tokens K; on a GPU also with vLLM's adaptive verification, if the
drafts are a model's. Each round measures one block of prompts, also without drafts, and drops the
slower half of the candidates at each temperature and load. The remaining ones are combined into
configs with K by load, for each temperature and for all, and compared on new prompts with no drafts
and with the best strict config.

Speeds are seconds per token of whole answers, because the length of a sampled answer is random.
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
    from vllm_mars.lab.rows import TextTable

NEEDED = sweep_command.NEEDED
NO_DRAFTS, PROBABILISTIC, MARS = "no drafts", "strict, probabilistic", "MARS"
ADAPTIVE = "adaptive"
TUNED, BEST_STRICT, FOR_ALL = "tuned", "strict at its best", "for all"
# Options of the sweep.
DEFAULTS: dict[str, Any] = {
    "methods": (),
    "cells": (f"{NO_DRAFTS}=null",),
    "block": 4,
    "side_by_side": 3,
    "temperatures": (0.0, 1.0),
    "concurrencies": (1, 4, 16),
}
# Share of the minutes for the choice; the comparison gets the rest.
CHOOSING = 0.5
# The choice ends at this number of candidates per point.
FEW = 3
# Half the width of a sufficiently narrow interval.
NARROW = 0.05

# A temperature and a load.
Point = tuple[float, int]
# A family of configs and K.
Candidate = tuple[str, int]
Paces = dict[tuple[str, Point], float]
# Family and speculative config (None for no drafts) by rule and temperature.
Served = dict[tuple[str, float], tuple[str, dict[str, Any] | None]]


def families_of(
    draft: str, max_loss: float, *, is_sampled: bool, on_cpu: bool
) -> dict[str, dict[str, Any]]:
    """Returns the speculative configs to compare, without K."""
    drafts = draft_config(draft)
    fixed, probabilistic = drafts_of(draft)
    # vLLM's CPU server samples wrong tokens; MARS at price 0 is equivalent.
    strict = drafts | (METHODS[STRICT if on_cpu and is_sampled else STANDARD] or {})
    families = {STRICT: strict | fixed, MARS: drafts | RECOMMENDED | {"mars_max_loss": max_loss}}
    if probabilistic and is_sampled:
        families[PROBABILISTIC] = strict | probabilistic
    if probabilistic and not on_cpu:
        # vLLM's estimator needs the logits of a draft model; candidates that it refuses drop out.
        adaptive = {"enable_adaptive_verification": True}
        best = PROBABILISTIC if is_sampled else STRICT
        families |= {f"{name}, {ADAPTIVE}": families[name] | adaptive for name in (best, MARS)}
    return families


def by_rule(records: Sequence[Record]) -> dict[tuple[str, Point], list[Record]]:
    groups: dict[tuple[str, Point], list[Record]] = {}
    for record in records:
        point = (record.temperature, record.concurrency)
        groups.setdefault((record.name, point), []).append(record)
    return groups


def paces(records: Sequence[Record]) -> Paces:
    from vllm_mars.lab.rows import pace

    intervals = {key: pace(group) for key, group in by_rule(records).items()}
    return {key: interval.value for key, interval in intervals.items() if interval}


def named(candidate: Candidate) -> str:
    return f"{candidate[0]}, K {candidate[1]}"


def faster_half(left: Sequence[Candidate], point: Point, known_paces: Paces) -> list[Candidate]:
    """Returns the faster half of a point's candidates, without failed ones."""
    order = sorted(left, key=lambda candidate: known_paces.get((named(candidate), point), math.inf))
    half = order[: -(-len(order) // 2)]
    return [candidate for candidate in half if (named(candidate), point) in known_paces]


def put_together(
    left: Mapping[Point, Sequence[Candidate]], known_paces: Paces, families: Iterable[str]
) -> tuple[str, dict[int, int]]:
    """Returns the family with the largest gain over no drafts, and its K by load.

    K is 0 at loads at which no drafts are faster.
    """

    def gain(family: str, k: int, points: Sequence[Point]) -> float:
        """Sums log gains over points; paces of dropped candidates are from early rounds."""
        names = [(named((family, k)), point) for point in points]
        if not k or not all(name in known_paces for name in names):
            return -math.inf if k else 0.0
        return sum(
            math.log(known_paces[NO_DRAFTS, point] / known_paces[name, point])
            for name, point in names
        )

    gained: dict[str, float] = {}
    lengths: dict[str, dict[int, int]] = {}
    for family in families:
        gained[family], lengths[family] = 0.0, {}
        for load in sorted({load for _, load in left}):
            points = [point for point in left if point[1] == load]
            ks = {0, *(k for point in points for name, k in left[point] if name == family)}
            gains = {k: gain(family, k, points) for k in sorted(ks)}
            lengths[family][load] = max(gains, key=lambda k: gains[k])
            gained[family] += max(gains.values())
    best = max(gained, key=lambda family: gained[family])
    return best, lengths[best]


def by_load(config: Mapping[str, Any], lengths: Mapping[int, int]) -> dict[str, Any] | None:
    """Returns vLLM's speculative config with K by batch size, or None for no drafts."""
    if not any(lengths.values()):
        return None
    scheduled = {**config, "num_speculative_tokens": max(lengths.values())}
    if len(set(lengths.values())) > 1:
        loads = sorted(lengths)
        begin = 1
        schedule = []
        for load, following in zip(loads, [*loads[1:], None], strict=True):
            # Up to the geometric mean of this load and the next.
            end = load if following is None else math.isqrt(load * following)
            schedule.append([begin, max(end, begin), lengths[load]])
            begin = schedule[-1][1] + 1
        scheduled["num_speculative_tokens_per_batch_size"] = schedule
    return scheduled


def settings(
    left: Mapping[Point, Sequence[Candidate]],
    known_paces: Paces,
    families: Mapping[str, dict[str, Any]],
) -> Served:
    """Returns the best strict, overall and temperature-independent config per temperature."""
    served: Served = {}
    for temperature in sorted({temperature for temperature, _ in left}):
        here = {point: those for point, those in left.items() if point[0] == temperature}
        strict = [family for family in families if not family.startswith(MARS)]
        for name, candidates, allowed in (
            (BEST_STRICT, here, strict),
            (TUNED, here, families),
            (FOR_ALL, left, families),
        ):
            family, lengths = put_together(candidates, known_paces, allowed)
            config = by_load(families[family], lengths)
            served[name, temperature] = (family if config else NO_DRAFTS), config
    return served


def rules(served: Served) -> list[str]:
    """Returns the cells to compare; equal settings of a temperature appear once."""
    names: dict[str, str] = {}
    for (name, temperature), (_, config) in served.items():
        if config:
            names.setdefault(json.dumps({**config, "temperature": temperature}), name)
    return [f"{NO_DRAFTS}=null", *(f"{name}={config}" for config, name in names.items())]


def tune(
    sweep: SweepOptions,
    families: Mapping[str, dict[str, Any]],
    lengths: Iterable[int],
    output: Path,
    *,
    minutes: float,
    anew: bool,
) -> tuple[Served, SweepFile]:
    """Chooses among all pairs of a family and a K; `sweep` has no rules.

    Returns:
        The chosen configs, and the file with only the final comparison.
    """
    from vllm_mars.lab.sweep import run_sweep

    every = list(itertools.product(families, lengths))
    cells = (
        f"{named((family, k))}={json.dumps({**families[family], 'num_speculative_tokens': k})}"
        for family, k in every
    )
    sweep = replace(sweep, cells=(f"{NO_DRAFTS}=null", *cells))
    num_blocks = -(-len(load_sweep(sweep).prompts) // sweep.block)
    left = {(t, load): list(every) for t in sweep.temperatures for load in sweep.concurrencies}
    block = 0
    while max(map(len, left.values())) > FEW or not block:
        due = {(block, NO_DRAFTS, point) for point in left}
        due |= {(block, named(candidate), point) for point in left for candidate in left[point]}
        file = run_sweep(sweep, output, anew=anew and not block, only=_among(due))
        # The file of an earlier call also has its comparison, in later blocks.
        seen = [record for record in file.records if record.block <= block]
        known_paces = paces(seen)
        left = {point: faster_half(those, point, known_paces) for point, those in left.items()}
        block += 1
        if _minutes(seen) > CHOOSING * minutes or block + 1 >= num_blocks:
            break
    if any((NO_DRAFTS, point) not in known_paces for point in left):
        reasons = (record.reason for record in file.records if not record.measured)
        raise RuntimeError(f"no drafts: {next(reasons, 'nothing was measured')}")
    served = settings(left, known_paces, families)
    last = replace(sweep, cells=tuple(rules(served)))
    compared = {(cell.name, (cell.temperature, cell.concurrency)) for cell in last.all_cells()}
    each = _minutes(seen) / len(seen) * len(compared)
    blocks = max(1, min(num_blocks - block, int((minutes - _minutes(seen)) / each)))
    file = run_sweep(last, output, only=lambda turn: block <= turn.block < block + blocks)
    later = by_rule([record for record in file.records if record.block >= block])
    return served, replace(
        file, records=[record for key in later if key in compared for record in later[key]]
    )


def _among(due: Collection[tuple[int, str, Point]]) -> Callable[[Turn], bool]:
    return lambda turn: (turn.block, turn.cell.name, turn.cell[2:]) in due


def _minutes(records: Sequence[Record]) -> float:
    return sum(record.measured.seconds for record in records if record.measured) / 60


def summarize(served: Served, file: SweepFile) -> tuple[list[str], "TextTable"]:
    """Returns the sentences that describe the choice, and the table of the comparison."""
    from vllm_mars.lab.rows import TextTable, pace, shown, temperature_label

    groups = by_rule(file.records)
    body = []
    widest = 0.0
    prompts = set()
    for (name, point), records in sorted(groups.items(), key=lambda item: item[0][1]):
        measured = [record.measured for record in records if record.measured]
        answers = [answer for turn in measured for answer in turn.answers]
        prompts |= {answer.prompt for answer in answers}
        length = sum(answer.tokens for answer in answers) / max(len(answers), 1)
        body.append([temperature_label(point[0]), f"{point[1]}", name])
        for other in (NO_DRAFTS, BEST_STRICT):
            base = groups.get((other, point), records)
            ratio = None if base is records or name == NO_DRAFTS else pace(records, base)
            if ratio:
                widest = max(widest, (ratio.high - ratio.low) / 2 / ratio.value)
            is_even = ratio and ratio.low <= 1 <= ratio.high
            body[-1].append(shown(ratio, ".2f") + (", no difference shown" if is_even else ""))
        body[-1] += [shown(pace(records), ".1f", 1000, ends=False), f"{length:.1f}"]
    titles = ["requests", "at a time", "rule", f"x {NO_DRAFTS}", f"x {BEST_STRICT}"]
    table = TextTable(
        "tokens per second of whole answers", [*titles, "ms per token", "tokens"], body
    )
    lines = []
    for (name, temperature), (family, config) in served.items():
        flag = f"--speculative-config '{json.dumps(config)}'" if config else "no such option"
        if name == TUNED:
            lines.append(f"{temperature_label(temperature)}: {family}, {flag}")
            if config and config == served[BEST_STRICT, temperature][1]:
                lines.append("That is strict verification at its best, so it was measured once.")
    if len({temperature for _, temperature in served}) > 1:
        # The loop ended with FOR_ALL, which is the same at each temperature.
        lines.append(f"A server has one setting; over all of these requests: {family}, {flag}")
    if math.isinf(widest):
        lines.append("One block of prompts gives no interval; give more --minutes or --prompts.")
    elif widest > NARROW:
        times = (widest / NARROW) ** 2
        lines.append(
            f"Intervals are up to ±{widest:.0%}. For ±{NARROW:.0%} the comparison, half of "
            f"--minutes, takes {times * _minutes(file.records):.0f} minutes, and "
            f"{times * len(prompts):.0f} prompts in addition to those that choose."
        )
    return lines, table


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="find the speculative config to serve, at each load",
        description="Measures no drafts, strict verification and MARS at several K on real servers "
        "with your prompts, drops slow ones, and prints a --speculative-config for each "
        "temperature and one for all, compared with no drafts and the best strict setting. "
        "Call it again to resume.",
    )
    add = parser.add_argument
    add("--model", metavar="MODEL", help="default: the packaged model with its EAGLE-3 head")
    add("--draft", metavar="DRAFT",
        help="ngram, suffix, mtp, or the directory or name of a draft model or head; default "
        "ngram, for the packaged model its head")  # fmt: skip
    add("--prompts", nargs="+", metavar="FILE", help="JSON lines with 'prompt', in random order")
    add("--temperature", dest="temperatures", nargs="+", type=float, metavar="T",
        help="temperatures of your requests; default 0 1")  # fmt: skip
    add("--concurrency", dest="concurrencies", nargs="+", type=int, metavar="N",
        help="requests at a time; default 1 4 16")  # fmt: skip
    add("--num-speculative-tokens", nargs="+", type=int, metavar="K", help="default 1 2 3 5")
    add("--max-loss", type=float, metavar="NATS", help="mars_max_loss; default 0.02")
    add("--minutes", type=float, help="of requests, without server starts; default 20")
    add("--max-tokens", type=int, metavar="N", help="longest answer; default 1024")
    add("--side-by-side", type=int, metavar="N",
        help="servers at a time, which share the GPU's memory; default 3")  # fmt: skip
    add("--output", type=Path, metavar="FILE", default=Path("build/tune.jsonl"),
        help="default build/tune.jsonl; the choice goes next to it as .json")  # fmt: skip
    sweep_command.add_shared(add)


def run(
    output: Path,
    anew: bool,
    draft: str | None = None,
    num_speculative_tokens: tuple[int, ...] = (1, 2, 3, 5),
    max_loss: float = RECOMMENDED["mars_max_loss"],
    minutes: float = 20.0,
    **options: Any,
) -> int:
    """Runs the command and returns 1 if a turn of the comparison failed."""
    draft = draft or (str(PACKAGED_HEAD) if options.get("model") is None else NGRAM)
    sweep = SweepOptions(**DEFAULTS | options)
    on_cpu = vllm_device()[0] == "cpu"
    families = families_of(draft, max_loss, is_sampled=any(sweep.temperatures), on_cpu=on_cpu)
    served, file = tune(sweep, families, num_speculative_tokens, output, minutes=minutes, anew=anew)
    lines, table = summarize(served, file)
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
