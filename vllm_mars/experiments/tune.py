"""`vllm-mars tune`: which speculative config to serve, as a sweep that drops what is slow.

Candidates are strict verification, the same with drawn drafts, and MARS with a bound, each at
several numbers of draft tokens K, beside no drafts. Rounds of one block of prompts each drop the
slower half at each temperature and load. What is left is put together, K by load, and measured on
prompts that the choice has not seen, beside no drafts and beside strict verification at its best.

Candidates are told apart by seconds per token of whole answers, because how long a sampled answer
gets is luck; the comparison at the end tells the time per answer.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_mars.experiments import sweep_command
from vllm_mars.experiments.plan import METHODS, STANDARD, STRICT, SweepOptions, Turn, load_sweep
from vllm_mars.experiments.records import Record, SweepFile
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import NGRAM, RECOMMENDED, WITHOUT_FILES, draft_config
from vllm_mars.local.prompts import PACKAGED
from vllm_mars.local.provenance import describe_run, vllm_device

NEEDED = sweep_command.NEEDED
NO_DRAFTS, DRAWN, MARS = "no drafts", "strict, drawn", "MARS"
TUNED, BEST_STRICT = "tuned", "strict at its best"
# Servers at a time: those of the last comparison take turns.
SIDE_BY_SIDE = 3
# Of the minutes, for the choice; the rest is for the comparison.
CHOOSING = 0.5
# Candidates of a point that are left when the choice ends.
FEW = 3


@dataclass(frozen=True)
class Options:
    """What the user asks.

    Attributes:
        model: None takes the packaged model with its head.
        minutes: of requests; servers' starts come on top.
        block: prompts of a round.
    """

    model: str | None = None
    draft: str | None = None
    prompts: tuple[str, ...] = (str(PACKAGED),)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    concurrencies: tuple[int, ...] = (1, 4, 16)
    num_speculative_tokens: tuple[int, ...] = (1, 2, 3, 5)
    max_loss: float = RECOMMENDED["mars_max_loss"]
    minutes: float = 20.0
    max_tokens: int = SweepOptions.max_tokens
    block: int = 4
    side_by_side: int | None = None
    server_args: tuple[str, ...] = ()

    def families(self, on_cpu: bool) -> dict[str, dict[str, Any]]:
        """What is compared, each without K."""
        draft = self.draft or (str(PACKAGED_HEAD) if self.model is None else NGRAM)
        drafts = draft_config(draft)
        drawn = {} if draft in WITHOUT_FILES else {"draft_sample_method": "probabilistic"}
        samples = any(self.temperatures)
        # vLLM's own server samples wrong tokens on a CPU; MARS at price 0 is the same.
        strict = drafts | (METHODS[STRICT if on_cpu and samples else STANDARD] or {})
        found = {
            STRICT: strict,
            MARS: drafts | drawn | RECOMMENDED | {"mars_max_loss": self.max_loss},
        }
        return found | ({DRAWN: strict | drawn} if drawn and samples else {})

    def sweep(self, cells: Mapping[str, dict[str, Any] | None]) -> SweepOptions:
        """The sweep of these rules, no drafts first."""
        return SweepOptions(
            model=self.model,
            methods=(),
            cells=tuple(f"{name}={json.dumps(config)}" for name, config in cells.items()),
            temperatures=self.temperatures,
            concurrencies=self.concurrencies,
            prompts=self.prompts,
            max_tokens=self.max_tokens,
            block=self.block,
            side_by_side=SIDE_BY_SIDE if self.side_by_side is None else self.side_by_side,
            server_args=self.server_args,
        )


# A temperature and a load.
Point = tuple[float, int]
# A family and K.
Candidate = tuple[str, int]
Paces = dict[tuple[str, Point], float]


def paces(records: Sequence[Record]) -> Paces:
    """Seconds per token of whole answers, by rule and point."""
    sums: dict[tuple[str, Point], list[float]] = {}
    for record in records:
        for answer in record.measured.answers if record.measured else ():
            of = sums.setdefault((record.name, (record.temperature, record.concurrency)), [0, 0])
            of[0] += answer.seconds
            of[1] += answer.tokens
    return {key: seconds / tokens for key, (seconds, tokens) in sums.items() if tokens}


def named(candidate: Candidate) -> str:
    """The name of a candidate's rule."""
    return f"{candidate[0]}, K {candidate[1]}"


def faster_half(left: Sequence[Candidate], point: Point, found: Paces) -> list[Candidate]:
    """The candidates of a point that stay after a round; one that failed goes."""
    order = sorted(left, key=lambda it: found.get((named(it), point), math.inf))
    return [it for it in order[: -(-len(order) // 2)] if (named(it), point) in found]


def put_together(
    left: Mapping[Point, Sequence[Candidate]], found: Paces, families: Sequence[str]
) -> tuple[str, dict[int, int]] | None:
    """The family that gains most over no drafts, and its K by load, 0 where no drafts are faster.

    Args:
        left: the candidates of each point.
        found: how fast they are, and no drafts.
        families: of which to choose.
    """
    loads = sorted({load for _, load in left})
    best: tuple[float, str, dict[int, int]] | None = None
    for family in families:
        gained, lengths = 0.0, {}
        for load in loads:
            points = [point for point in left if point[1] == load]

            def gain(k: int, points: Sequence[Point] = points, family: str = family) -> float:
                """Of all temperatures, in logarithms; what was dropped was slower than it looks."""
                names = [(named((family, k)), point) for point in points]
                if not k or not all(name in found for name in names):
                    return -math.inf if k else 0.0
                return sum(
                    math.log(found[NO_DRAFTS, point] / found[name])
                    for name, point in zip(names, points, strict=True)
                )

            ks = {k for point in points for own, k in left[point] if own == family}
            lengths[load] = max(sorted({0, *ks}), key=gain)
            gained += gain(lengths[load])
        if best is None or gained > best[0]:
            best = gained, family, lengths
    return None if best is None else best[1:]


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


def tune(options: Options, output: Path, *, anew: bool = False) -> tuple[dict[str, Any], SweepFile]:
    """Measures what the file lacks, and chooses.

    Returns:
        What to serve, for JSON, and of the file the comparison at the end.

    Raises:
        ValueError, RuntimeError: as `run_sweep`, or nothing answered.
    """
    from vllm_mars.experiments.sweep import run_sweep

    families = options.families(vllm_device()[0] == "cpu")
    every = [(family, k) for family in families for k in options.num_speculative_tokens]
    cells = {
        named((family, k)): {**families[family], "num_speculative_tokens": k} for family, k in every
    }
    sweep = options.sweep({NO_DRAFTS: None, **cells})
    num_blocks = -(-len(load_sweep(sweep).prompts) // options.block)
    left = {(t, load): list(every) for t in options.temperatures for load in options.concurrencies}
    file, block = SweepFile((), ()), 0
    while max(map(len, left.values())) > FEW or not block:
        now = {(named(it), point) for point, those in left.items() for it in those}

        def is_due(turn: Turn, block: int = block, now: set[tuple[str, Point]] = now) -> bool:
            point = turn.cell.temperature, turn.cell.concurrency
            is_left = turn.cell.name == NO_DRAFTS or (turn.cell.name, point) in now
            return turn.block == block and is_left

        file = run_sweep(sweep, output, anew=anew and not block, only=is_due)
        # A file that an earlier call left also holds its comparison, in later blocks.
        seen = [it for it in file.records if it.block <= block]
        found = paces(seen)
        left = {point: faster_half(those, point, found) for point, those in left.items()}
        block += 1
        if _minutes(seen) > CHOOSING * options.minutes or block + 1 >= num_blocks:
            break
    if any((NO_DRAFTS, point) not in found for point in left):
        raise RuntimeError(f"no drafts: {_problem(file)}")
    chosen = put_together(left, found, list(families))
    strict = put_together(left, found, [it for it in families if it != MARS])
    assert chosen and strict, "there are families"
    served = {
        name: by_load(families[family], lengths)
        for name, (family, lengths) in ((BEST_STRICT, strict), (TUNED, chosen))
    }
    compare = {NO_DRAFTS: None, **{name: it for name, it in served.items() if it}}
    each = _minutes(seen) / len(seen) * len(compare) * len(left)
    blocks = max(1, min(num_blocks - block, int((options.minutes - _minutes(seen)) / each)))
    file = run_sweep(
        options.sweep(compare), output, only=lambda turn: block <= turn.block < block + blocks
    )
    compared = [it for it in file.records if it.block >= block and it.name in compare]
    told = {
        "speculative_config": served[TUNED],
        "rule": chosen[0] if served[TUNED] else NO_DRAFTS,
        "model": options.model or "the packaged model",
        "file": output.name,
        **describe_run(None),
    }
    return told, replace(file, records=compared)


def _minutes(records: Sequence[Record]) -> float:
    return sum(it.measured.seconds for it in records if it.measured) / 60


def _problem(file: SweepFile) -> str:
    return next((it.reason for it in file.records if not it.measured), "nothing was measured")


def sentences(file: SweepFile) -> list[str]:
    """What the choice gains at each temperature and load, beside no drafts and strict."""
    from vllm_mars.experiments.rows import rows, shown

    beside: dict[Point, list[str]] = {}
    for baseline in (NO_DRAFTS, BEST_STRICT):
        heads = [replace(head, baseline=baseline) for head in file.heads]
        for row in rows(replace(file, heads=heads)):
            if row.cell.name == TUNED and row.speed:
                point = row.cell.temperature, row.cell.concurrency
                beside.setdefault(point, []).append(f"{shown(row.speed, '.2f')} x {baseline}")
    return [
        f"{'Greedy' if not temperature else f'At temperature {temperature:g}'}, {load} at a time: "
        f"an answer is {' and '.join(texts)} as fast."
        for (temperature, load), texts in sorted(beside.items())
    ]


def add_parser(commands: Any) -> None:
    """Adds the command to `vllm-mars`."""
    parser = commands.add_parser(
        "tune",
        help="find the speculative config to serve, at each load",
        description="Measures no drafts, strict verification and MARS at several K on real servers "
        "with your prompts, drops what is slow, and prints one --speculative-config for all loads, "
        "beside no drafts and strict verification at its best. Called again it goes on.",
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
    add("--block", type=int, metavar="N", help="prompts of a round; default 4")
    add("--side-by-side", type=int, metavar="N",
        help=f"servers at a time, which share the GPU's memory; default {SIDE_BY_SIDE}, all of the "
        "last comparison")  # fmt: skip
    add("--output", type=Path, metavar="FILE", default=Path("build/tune.jsonl"),
        help="default build/tune.jsonl; the choice goes beside it as .json")  # fmt: skip
    add("--anew", action="store_true", help="measure all again; what was there moves to FILE.old")
    add("--server-arg", dest="server_args", action="append", metavar="ARG",
        help="one more argument of every server, such as --server-arg=--max-model-len=4096; "
        "repeatable")  # fmt: skip


def run(output: Path, anew: bool, **given: Any) -> int:
    """Runs the command and returns 0."""
    from rich.console import Console

    from vllm_mars.experiments.rows import rich_table, rows, tables

    told, file = tune(Options(**given), output, anew=anew)
    console = Console(width=None if sys.stdout.isatty() else sweep_command.FILE_WIDTH)
    heads = [replace(head, baseline=NO_DRAFTS) for head in file.heads]
    for table in tables(rows(replace(file, heads=heads)), NO_DRAFTS):
        console.print(rich_table(table))
    told["gains"] = sentences(file)
    output.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    config = told["speculative_config"]
    last = (
        "Serve without drafts."
        if config is None
        else f"--speculative-config '{json.dumps(config)}'"
    )
    print(*told["gains"], last, sep="\n")
    return 0
