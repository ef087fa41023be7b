"""The arguments of `vllm-mars sweep`."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_mars.lab.rows import TextTable

from vllm_mars.kernels.rules import RULES

NEEDED = ("filelock", "pydantic", "rich", "scipy")
# For files and pipes, for which rich would cut tables to 80 characters.
FILE_WIDTH = 200


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "sweep",
        help="measure rules, drafts, temperatures and load on real vLLM servers",
        description="Serves a model with each rule, lets the servers answer the same prompts in "
        "turn, times them with `vllm bench serve` and writes one JSON line for each turn. Call it "
        "again to resume. Without options: the packaged model, ngram drafts, strict verification "
        "and the recommended setting; see docs/measuring.md.",
    )
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", default=Path("build/sweep.jsonl"),
        help="default build/sweep.jsonl; logs go next to it")  # fmt: skip
    add("--model", metavar="MODEL", help="default: the packaged model")
    add("--draft", dest="drafts", nargs="+", metavar="DRAFT",
        help="ngram, suffix, mtp, or the directory or name of a draft model or head; default "
        "ngram")  # fmt: skip
    add("--num-speculative-tokens", nargs="+", type=int, metavar="K",
        help="draft tokens per step; default 4")  # fmt: skip
    add("--method", dest="methods", nargs="+", metavar="METHOD",
        help="autoregressive, standard (vLLM's default), strict (MARS at price 0), mars (the "
        "recommended setting), or any other rejection_sample_method of vLLM; default standard, and "
        "mars if there is no other rule")  # fmt: skip
    for name, rule in RULES.items():
        add(f"--{name}", nargs="+", type=float, metavar="VALUE",
            help=f"a rule for each {rule.option}")  # fmt: skip
    add("--cell", dest="cells", action="append", metavar="NAME=JSON",
        help="a rule of any keys of vLLM's speculative config, such as 'bounded={\"mars_price\": "
        "0.3, \"mars_max_loss\": 0.02}', and \"draft\" and \"temperature\"")  # fmt: skip
    add("--baseline", metavar="NAME", help="rule in the denominator of ratios; default the first")
    add("--temperature", dest="temperatures", nargs="+", type=float, metavar="T", help="default 0")
    add("--concurrency", dest="concurrencies", nargs="+", type=int, metavar="N",
        help="requests at a time; default 1")  # fmt: skip
    add("--prompts", nargs="+", metavar="FILE", help="JSON lines with 'prompt'")
    add("--num-prompts", type=int, metavar="N", help="from the categories in turn; default all")
    add("--max-tokens", type=int, metavar="N", help="longest answer; default 1024")
    add("--ignore-eos", action="store_true", default=None, help="make each answer that long")
    add("--block", type=int, metavar="N", help="prompts per turn; default 8")
    add("--repeats", type=int, metavar="N", help="passes over all prompts; default 1")
    add("--seed", type=int, help="default 0")
    add("--side-by-side", type=int, metavar="N",
        help="servers at a time; default 0: all on a CPU, one on a GPU")  # fmt: skip
    add("--startup-timeout", type=float, metavar="SECONDS", help="per server; default 600")
    add("--turn-timeout", type=float, metavar="SECONDS", help="per turn; default 3600")
    add("--retry-failed", action="store_true", help="measure failed turns again")
    add("--ray", metavar="ADDRESS", help="measure on this Ray cluster; 'auto' finds a local one")
    add("--gpus", type=int, metavar="N", help="GPUs per server on Ray; default 1")
    add_shared(add)


def add_shared(add: Any) -> None:
    """Adds the options of all commands that run a sweep."""
    add("--anew", action="store_true", help="measure all again; the old file becomes FILE.old")
    add("--server-arg", dest="server_args", action="append", metavar="ARG",
        help="one more argument of every server, such as --server-arg=--max-model-len=4096; "
        "repeatable")  # fmt: skip


def show(tables: "Iterable[TextTable]") -> None:
    from rich.console import Console

    from vllm_mars.lab.rows import rich_table

    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    for table in tables:
        console.print(rich_table(table))


def run(output: Path, anew: bool, retry_failed: bool, ray: str | None = None, **fields: Any) -> int:
    """Runs the command and returns 1 if a turn failed."""
    from vllm_mars.lab.plan import SweepOptions
    from vllm_mars.lab.rows import rows, tables
    from vllm_mars.lab.sweep import run_sweep

    values = {name: fields.pop(name) for name in RULES if name in fields}
    options = SweepOptions(values=values, **fields)
    file = run_sweep(options, output, ray=ray, retry_failed=retry_failed, anew=anew)
    show(tables(rows(file), options.base))
    return int(any(record.measured is None for record in file.records))
