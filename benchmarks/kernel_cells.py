"""One cell of `benchmarks.kernel`: all variants of a shape, or all launch settings for it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.kernel_timing import HostClock, summary, time_in_turn
from benchmarks.kernel_variants import (
    BASELINES,
    MismatchError,
    Outputs,
    Shape,
    Step,
    Variant,
    build,
    mars,
)
from vllm_mars.kernels import top2

MODES = ("graph", "eager")
Settings = tuple[int, int, int]


def time_variants(
    clock: HostClock, shape: Shape, variants: dict[str, Variant], rounds: int
) -> dict[str, dict[str, Any]]:
    """Times checked variants under a graph, whose outputs are checked again, and without one."""
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    results: dict[str, dict[str, Any]] = {}
    for name, variant in variants.items():
        results[name] = {"bytes": variant.bytes, "checked": variant.expected is not None}
        calls[name, "eager"] = variant.run
        try:
            replay = clock.capture(variant.run)
        except Exception as error:
            # A baseline may wait for the host anywhere, each with an error of its own; what ends
            # the capture then only says that something failed before.
            cause = error.__context__ or error
            results[name] |= {"graph": False, "graph_error": _first_line(cause)}
            continue
        variant.check(f"{name} (graph)", shape, replay)
        calls[name, "graph"] = replay
    for (name, mode), runs in time_in_turn(clock, calls, rounds).items():
        results[name][mode] = summary(runs)
    for result in results.values():
        median = (result["graph"] or result["eager"])["median"]
        result["gb_per_s"] = result["bytes"] / median / 1e3
    return results


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def measure_cell(clock: HostClock, shape: Shape, bandwidth: float, rounds: int) -> dict[str, Any]:
    """All variants of one shape; the bandwidth is the device's in GB/s, as measured.

    Raises:
        MismatchError: a variant gave other tokens than the reference.
    """
    variants, skipped = build(Step(shape, clock.device))
    results = time_variants(clock, shape, variants, rounds)
    for result in results.values():
        result["share_of_bandwidth"] = result["gb_per_s"] / bandwidth
    speedups = {
        mode: {
            name: results[name][mode]["median"] / results["mars"][mode]["median"]
            for name in BASELINES
            if name in results and results[name][mode] and results["mars"][mode]
        }
        for mode in MODES
    }
    return {
        **shape._asdict(),
        "rows": shape.rows,
        "logits_bytes": shape.logits_bytes,
        "variants": {**results, **{name: {"skipped": why} for name, why in skipped.items()}},
        "speedup_of_mars_over": speedups,
    }


def launch_candidates(shape: Shape, sms: int) -> Iterator[Settings]:
    """Settings of `top2_kernel`: (blocks of a split, block size, warps)."""
    for block, per_sm, warps in itertools.product((2048, 4096, 8192), (1, 2, 4, 8), (4, 8, 16)):
        blocks = -(-shape.vocab // block)
        splits = max(1, min(blocks, round(per_sm * sms / shape.rows)))
        yield -(-blocks // splits), block, warps


def tune_cell(
    clock: HostClock, shape: Shape, bandwidth: float, rounds: int, limit: int | None = None
) -> dict[str, Any]:
    """Times the kernels at one shape with many launch settings of the reduction, the best first.

    A limit takes only so many settings, the present ones among them.

    Raises:
        MismatchError: with some settings the kernels gave other tokens than the reference.
    """
    variant = mars(Step(shape, clock.device))
    present = top2.launch_settings(shape.vocab, shape.rows)
    candidates = dict.fromkeys([present, *launch_candidates(shape, clock.describe()["sms"])])
    by_name: dict[str, Settings] = {}
    variants: dict[str, Variant] = {}
    rows: list[dict[str, Any]] = []
    for settings in list(candidates)[:limit]:
        name = "{} blocks of {}, {} warps".format(*settings)
        run = functools.partial(_launched_with, settings, variant.run)
        tuned = dataclasses.replace(variant, run=run)
        try:
            tuned.check(f"mars with {name}", shape)
        except MismatchError:
            raise
        except Exception as error:
            # Such as settings that need more registers than there are.
            rows.append({"settings": settings, "skipped": _first_line(error)})
        else:
            by_name[name], variants[name] = settings, tuned
    for name, result in time_variants(clock, shape, variants, rounds).items():
        blocks, block, warps = by_name[name]
        rows.append(
            {
                "settings": by_name[name],
                "name": name,
                "programs": shape.rows * -(-shape.vocab // (blocks * block)),
                "is_present": by_name[name] == present,
                **result,
                "share_of_bandwidth": result["gb_per_s"] / bandwidth,
            }
        )
    rows.sort(key=lambda row: -row.get("gb_per_s", 0))
    return {**shape._asdict(), "logits_bytes": shape.logits_bytes, "table": rows}


def _launched_with(settings: Settings, run: Callable[[], Outputs]) -> Outputs:
    present = top2.launch_settings
    top2.launch_settings = lambda vocab, num_rows: settings
    try:
        return run()
    finally:
        top2.launch_settings = present
