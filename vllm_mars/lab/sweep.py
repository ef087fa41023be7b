"""Runs a sweep on this machine or on a Ray cluster, resuming from its file."""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import time
import typing
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from vllm_mars.lab.measure import LocalRunner
from vllm_mars.lab.plan import METHODS, STANDARD, Sweep, SweepOptions, Turn, load_sweep
from vllm_mars.lab.ray_turns import RayRunner
from vllm_mars.lab.records import (
    Record,
    RunHeader,
    SweepFile,
    append_line,
    read_sweep,
    require_writable,
)
from vllm_mars.models.draft_head import check_head
from vllm_mars.models.packaged_model import ensure_model
from vllm_mars.options.config import METHOD
from vllm_mars.servers.provenance import describe_run, versions, without_directories


def run_sweep(
    options: SweepOptions,
    output: Path,
    *,
    ray: str | None = None,
    retry_failed: bool = False,
    anew: bool = False,
    only: Callable[[Turn], bool] = lambda _: True,
) -> SweepFile:
    """Measures the turns that a file lacks and returns its content; progress goes to stderr.

    No process outlives the call.

    Args:
        ray: address of a Ray cluster; None for this machine.
        anew: measures all turns again, after renaming an existing file to `output` + ".old".

    Raises:
        ValueError: prompts or drafts cannot be used, or the file is from another sweep.
        RuntimeError: the model, the file, vLLM or the cluster cannot be used.
    """
    import filelock
    from rich.console import Console

    say = partial(Console(stderr=True).print, soft_wrap=True, markup=False, highlight=False)
    check_methods(options)
    sweep = load_sweep(options)
    settings = _settings(sweep)
    require_writable(output)
    lock = filelock.FileLock(f"{output}.lock", timeout=0)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except filelock.Timeout as error:
            raise RuntimeError(
                f"output={output} is in use by another sweep; wait for it or name another file."
            ) from error
        stack.callback(Path(lock.lock_file).unlink, missing_ok=True)
        if anew and output.exists():
            output.replace(f"{output}.old")
        before = read_sweep(output) if output.exists() else SweepFile((), ())
        _check_same(before, settings, output)
        done = {
            record.key
            for record in before.records
            if not (retry_failed and record.measured is None)
        }
        due = [turn for _, turns in sweep.groups(0) for turn in turns if only(turn)]
        _check_rules(before, due, output)
        total = len(due)
        left = sum(turn.key not in done for turn in due)
        if not left:
            say(f"all {total} turns are in {output}; --anew measures them again")
            return before
        sweep = dataclasses.replace(sweep, model=options.model or str(ensure_model()))
        if (model := Path(sweep.model)).is_dir():
            for draft in filter(Path.is_dir, map(Path, options.drafts)):
                check_head(draft, model)
        runner: LocalRunner | RayRunner
        if ray is None:
            runner = LocalRunner(sweep, output.with_name(f"{output.stem}-logs"), say)
        else:
            runner = stack.enter_context(contextlib.closing(RayRunner(sweep, ray)))
        groups = [
            (servers, [turn for turn in turns if turn.key not in done and only(turn)])
            for servers, turns in sweep.groups(runner.side_by_side)
        ]
        starts = sum(len({turn.server for turn in turns}) for _, turns in groups)
        say(f"{total} turns, {total - left} of them in {output}; {starts} servers start")
        header = RunHeader(settings, options.base, describe_run(runner.gpu))
        append_line(output, dataclasses.asdict(header))
        measured = runner.run([group for group in groups if group[1]])
        for number, record in enumerate(stack.enter_context(contextlib.closing(measured)), 1):
            append_line(output, dataclasses.asdict(record))
            rest = ""
            if number == 1:
                # The first turn includes the start of servers, which would distort the estimate.
                started = time.monotonic()
            else:
                each = (time.monotonic() - started) / (number - 1)
                to_go = timedelta(seconds=round(each * (left - number)))
                rest = f"; {each:.0f} s a turn, {to_go} left"
            block = f"block {record.block + 1} of {-(-len(sweep.prompts) // options.block)}"
            say(f"[{total - left + number}/{total}] {block}, {_outcome(record)}{rest}")
    say(f"wrote {output}")
    return read_sweep(output)


def check_methods(options: SweepOptions) -> None:
    """Raises ValueError, with the nearest name, if the installed vLLM lacks a method."""
    methods = {(cell.config or {}).get("rejection_sample_method") for cell in options.all_cells()}
    if not (unknown := {str(method) for method in methods if method} - {STANDARD, METHOD}):
        return
    try:
        # Takes about ten seconds.
        from vllm.config import SpeculativeConfig
    except ImportError:
        return
    theirs = typing.get_args(typing.get_type_hints(SpeculativeConfig)["rejection_sample_method"])
    for name in sorted(unknown - {*theirs}):
        words = [*dict.fromkeys([*METHODS, *theirs])]
        nearest, *_ = difflib.get_close_matches(name, words, 1, 0)
        raise ValueError(
            f"method={name!r} is no rejection_sample_method of vLLM {versions()['vllm']}; did you "
            f"mean {nearest!r}? There are {', '.join(words)}."
        )


def _settings(sweep: Sweep) -> dict[str, Any]:
    options = sweep.options
    prompts = json.dumps([[prompt.id, prompt.turns[0]] for prompt in sweep.prompts]).encode()
    return {
        "model": Path(options.model).name if options.model else None,
        "prompts": len(sweep.prompts),
        "prompts_sha256": hashlib.sha256(prompts).hexdigest()[:16],
        **{name: getattr(options, name) for name in ("max_tokens", "ignore_eos", "block", "seed")},
        "server_args": without_directories(options.server_args),
        "vllm": versions()["vllm"],
    }


def _check_same(file: SweepFile, settings: dict[str, Any], output: Path) -> None:
    for header in file.heads:
        for name, new in settings.items():
            if (old := header.settings.get(name)) != new:
                raise ValueError(
                    f"output={output} was measured with {name}={old}, but this sweep has {new}; "
                    "name another file, repeat the options of the first, or give --anew."
                )


def _check_rules(file: SweepFile, due: Sequence[Turn], output: Path) -> None:
    """Raises if the file has a rule of the same name with another config."""
    known = {record.key: record.config for record in file.records}
    for turn in due:
        (config,) = without_directories([json.dumps(turn.cell.config)])
        if turn.key in known and known[turn.key] != json.loads(config):
            raise ValueError(
                f"output={output} has {turn.cell.name!r} with {known[turn.key]}, but this sweep "
                f"has {config}; name another file, repeat the options of the first, or give --anew."
            )


def _outcome(record: Record) -> str:
    name = f"{record.name}, T {record.temperature:g}, {record.concurrency} at once"
    if record.measured is None:
        return f"{name}: failed: {record.problem}"
    measured = record.measured
    speed = sum(answer.tokens for answer in measured.answers) / measured.seconds
    steps = f", {1 + measured.accepted / measured.drafts:.2f} per step" if measured.drafts else ""
    return f"{name}: {speed:.1f} tokens/s{steps}"
