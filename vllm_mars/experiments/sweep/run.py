"""Runs a sweep: plans its cells, measures what the file does not hold yet, and judges."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from vllm_mars.experiments.quality.judge import unjudged
from vllm_mars.experiments.sweep.datasets import load_dataset
from vllm_mars.experiments.sweep.plan import Sweep, SweepOptions, plan
from vllm_mars.experiments.sweep.ray_cells import RayRunner
from vllm_mars.experiments.sweep.record_file import (
    append_cell,
    append_quality,
    read_cells,
    repair_end,
)
from vllm_mars.experiments.sweep.records import Cell, Settings
from vllm_mars.experiments.sweep.runners import LocalRunner
from vllm_mars.local.draft_head import check_head, is_head
from vllm_mars.local.drafts import draft_config, draft_name
from vllm_mars.local.packaged_model import ensure_model
from vllm_mars.local.provenance import weights, without_directories
from vllm_mars.local.result_file import require_writable


def run_sweep(
    options: SweepOptions,
    output: Path,
    *,
    ray_address: str | None = None,
    retry_failed: bool = False,
    anew: bool = False,
) -> list[Cell]:
    """Measures and judges a sweep; one that was interrupted continues.

    No process outlives the call, whichever way it ends. Cells that the file `output` holds are not
    measured again, but with `retry_failed` those that failed are, and with `anew` all: then what
    the file held moves to `output` with ".old" at its end.

    Raises:
        ValueError: prompts or drafts cannot be read, a head is damaged or made for another target,
            or the file is of another sweep.
        RuntimeError: the model cannot be made, the file is in use or cannot be written, vLLM cannot
            be imported, or the cluster cannot be used.
    """
    from rich.console import Console

    say = partial(Console(stderr=True).print, soft_wrap=True, markup=False, highlight=False)
    files = (load_dataset(name, options.num_prompts) for name in options.datasets)
    datasets = tuple(block for file in files for block in file.blocks(options.block))
    for draft in options.drafts:
        draft_config(draft)
    command = (Path(sys.argv[0]).name, *without_directories(sys.argv[1:]))
    sweep = Sweep(options, options.model or "", datasets, command)
    with _locked(output), contextlib.ExitStack() as stack:
        repair_end(output)
        before = read_cells(output) if output.exists() and not anew else []
        _check_same_sweep(before, sweep.settings, output)
        sweep = dataclasses.replace(sweep, model=options.model or str(ensure_model()))
        _check_same_weights(before, sweep, output)
        if (model := Path(sweep.model)).is_dir():
            for head in filter(is_head, map(Path, options.drafts)):
                check_head(head, model)
        runner: LocalRunner | RayRunner
        if ray_address is None:
            runner = LocalRunner(sweep, output.with_name(f"{output.stem}-logs"))
        else:
            runner = stack.enter_context(contextlib.closing(RayRunner(sweep, ray_address)))
        if anew and output.exists():
            output.replace(f"{output}.old")
        groups = plan(sweep, runner.side_by_side)
        kept = {c.key for c in before if not (retry_failed and c.status == "failed")}
        total = sum(len(group.cells) for group in groups)
        todo = [left for group in groups if (left := group.without(kept)).cells]
        done = total - sum(len(group.cells) for group in todo)
        servers = sum(len(group.servers) for group in todo)
        say(f"{total} cells, {done} of them in {output} already; {servers} server starts")
        measured = runner.run(todo)
        for number, cell in enumerate(stack.enter_context(contextlib.closing(measured))):
            append_cell(output, cell)
            done, rest = done + 1, ""
            if not number:
                # Before the first cell servers start, which would count for each of the others.
                started = time.monotonic()
            else:
                each = (time.monotonic() - started) / number
                rest = f"; about {timedelta(seconds=round(each * (total - done)))} left"
            say(f"[{done}/{total}] {cell.key.label}: {_outcome(cell)}{rest}")
        cells = read_cells(output)
        # Another model's answers are not this target's to judge.
        own = [c for c in cells if c.status == "ok" and c.key.model == Path(sweep.model).name]
        if options.judge and unjudged(own):
            say("judging the answers")
            judged = runner.judge(own)
            for key, quality in stack.enter_context(contextlib.closing(judged)):
                append_quality(output, key, quality)
            cells = read_cells(output)
    say(f"wrote {output}")
    return cells


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Keeps a second sweep away from the file."""
    import filelock

    require_writable(output)
    lock = filelock.FileLock(f"{output}.lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise RuntimeError(
            f"output={output} is in use by another sweep; wait for it or name another file."
        ) from error
    try:
        yield
    finally:
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


def _check_same_sweep(cells: Sequence[Cell], settings: Settings, output: Path) -> None:
    for cell in cells:
        for field in dataclasses.fields(Settings):
            old, new = getattr(cell.settings, field.name), getattr(settings, field.name)
            if field.name == "checksums":
                # The names are those of `prompts`; an older file has no checksums.
                if changed := [name for name in old if old[name] != new[name]]:
                    raise ValueError(
                        f"output={output} was measured with other prompts named {changed[0]!r}; "
                        "name another file, or give the prompts of the first."
                    )
            elif old != new:
                raise ValueError(
                    f"output={output} was measured with {field.name}={old}, but this sweep has "
                    f"{new}; name another file, or repeat the options of the first."
                )


def _check_same_weights(cells: Sequence[Cell], sweep: Sweep, output: Path) -> None:
    drafts = {draft_name(draft): draft for draft in sweep.options.drafts}
    for cell in cells:
        if cell.key.model != Path(sweep.model).name:
            continue
        new = weights(sweep.model, drafts.get(cell.key.draft))
        for what, old in cell.weights.items():
            if old and new[what] and old != new[what]:
                name = getattr(cell.key, what)
                raise ValueError(
                    f"output={output} was measured with other weights of the {what} {name!r}; name "
                    "another file, or give the weights of the first."
                )


def _outcome(cell: Cell) -> str:
    if cell.status != "ok":
        return f"{cell.status}: {cell.reason.splitlines()[0]}"
    figures = f"{len(cell.task_answers)} answers scored by lm-eval"
    if cell.speed is not None:
        figures = f"{cell.speed.tokens_per_second:.1f} tokens/s"
    if cell.acceptance is not None:
        figures += f", acceptance length {cell.acceptance.mean_length:.2f}"
    return figures
