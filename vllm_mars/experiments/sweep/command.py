"""The arguments of `vllm-mars sweep`."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from vllm_mars.experiments.sweep.plan import SweepOptions
from vllm_mars.experiments.sweep.records import METHODS

NEEDED = ("filelock", "jsonschema", "pandas", "pydantic", "rich", "rouge_score", "sacrebleu")
FILE_WIDTH = 220


def add_parser(commands: Any) -> None:
    """Adds the command to `vllm-mars`."""
    parser = commands.add_parser(
        "sweep",
        help="measure speed and quality over a grid of methods, thresholds, K, drafts and load",
        description="Serves a model with every method, measures each cell of the grid with "
        "`vllm bench serve`, judges the answers against the autoregressive ones and writes one "
        "JSON line per cell. An interrupted sweep continues when it is called again. Without "
        "options: the packaged model and ngram drafts, about an hour on two CPU cores; see "
        "docs/sweep.md.",
    )
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", default=Path("build/sweep.jsonl"),
        help="default build/sweep.jsonl")  # fmt: skip
    add("--short", action="store_true", help="about five minutes: fewer and shorter answers")
    add("--model", metavar="MODEL", help="default: the packaged model")
    add("--draft", dest="drafts", nargs="+", metavar="DRAFT",
        help="ngram, suffix, mtp, or the directory or name of a draft model or head; default "
        "ngram")  # fmt: skip
    add("--method", dest="methods", nargs="+", choices=METHODS, metavar="METHOD",
        help=f"of {', '.join(METHODS)}; default all")  # fmt: skip
    for option, values, metavar in (
        ("theta", SweepOptions.thetas, "THETA"),
        ("gap", SweepOptions.gaps, "NATS"),
        ("price", SweepOptions.prices, "NATS"),
    ):
        add(f"--{option}", dest=f"{option}s", nargs="*", type=float, metavar=metavar,
            help=f"default {' '.join(map(str, values))}; no value: none")  # fmt: skip
    add("--mars-options", nargs="+", metavar="JSON",
        help="measure every rule of MARS with each of these sets of further options, such as "
        "{} '{\"mars_max_loss\": 0.1}'")  # fmt: skip
    add("--no-unprotected", dest="unprotected", action="store_false", default=None,
        help="leave out MARS without protected tokens")  # fmt: skip
    add("--num-speculative-tokens", dest="num_speculative_tokens", nargs="+", type=int, metavar="K",
        help="draft tokens per step; default 4")  # fmt: skip
    add("--temperature", dest="temperatures", nargs="+", type=float, metavar="T",
        help="default 0 1")  # fmt: skip
    add("--concurrency", dest="concurrencies", nargs="+", type=int, metavar="N",
        help="requests at a time; default 1 4 16 64")  # fmt: skip
    add("--prompts", dest="datasets", nargs="+", metavar="FILE",
        help="JSON lines, vllm:NAME[:PATH] of vllm bench serve, lm-eval:TASK[.yaml]")  # fmt: skip
    add("--num-prompts", type=int, metavar="N", help="of each file; 0 for all; default 16")
    add("--block", type=int, metavar="N",
        help="prompts of a file that a server is asked in one turn; default all")  # fmt: skip
    add("--max-tokens", type=int, metavar="N", help="longest answer; default 80")
    add("--repeats", type=int, metavar="N", help="passes over the grid; default 3")
    add("--seed", type=int, help="of every server; default 0")
    add("--reference-theta", type=float, metavar="THETA", help="theta under load; default 0.9")
    add("--full-grid", action="store_true", default=None, help="measure every combination")
    add("--side-by-side", type=int, metavar="N",
        help="servers at a time; default 0: all of one draft on a CPU, one on a GPU")  # fmt: skip
    add("--tensor-parallel", type=int, metavar="N")
    add("--pipeline-parallel", type=int, metavar="N")
    add("--startup-timeout", type=float, metavar="SECONDS", help="per server; default 600")
    add("--cell-timeout", type=float, metavar="SECONDS", help="per cell; default 3600")
    add("--margin", type=float, metavar="SHARE",
        help="loss that counts as none, as a share of the task score; default 0.05")  # fmt: skip
    add("--nll-margin", type=float, metavar="NATS", help="the same of NLL per token; default 0.05")
    add("--no-judge", dest="judge", action="store_false", default=None, help="measure speed only")
    add("--retry-failed", action="store_true", help="measure failed cells again")
    add("--ray", metavar="ADDRESS", help="measure on this Ray cluster; 'auto' finds a local one")
    add("--server-arg", dest="server_args", action="append", metavar="ARG",
        help="one more argument of every server, such as --server-arg=--max-model-len=4096; "
        "repeatable")  # fmt: skip


def run(
    output: Path, short: bool, retry_failed: bool, ray: str | None = None, **options: Any
) -> int:
    """Runs the command; an option that is given overrides the short form's.

    Returns:
        0, or 1 where no cell at all could be measured.
    """
    from rich.console import Console

    from vllm_mars.experiments.sweep.run import run_sweep
    from vllm_mars.experiments.sweep.summary import print_rows, rows

    base = SweepOptions().short() if short else SweepOptions()
    chosen = dataclasses.replace(base, **options)
    cells = run_sweep(chosen, output, ray_address=ray, retry_failed=retry_failed)
    # A file or a pipe has no width to keep to, and rich would cut the columns to 80 characters.
    width = None if sys.stdout.isatty() else FILE_WIDTH
    print_rows(rows(cells, chosen.margin, chosen.nll_margin), Console(width=width))
    return 0 if any(cell.status == "ok" for cell in cells) else 1
