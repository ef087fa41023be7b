"""The subcommand `vllm-mars calibrate`."""

from pathlib import Path
from typing import Any

NEEDED = ("filelock", "jsonschema", "numpy", "rich")


def add_parser(commands: Any) -> None:
    """Adds the command to `vllm-mars`."""
    parser = commands.add_parser(
        "calibrate",
        help="find the loosest threshold whose loss stays within a budget",
        description="Finds the smallest mars_theta (or the largest mars_gap or mars_price) whose "
        "loss under the target stays within a budget, for one model and draft, and writes a file "
        'for a server\'s speculative config: "mars_theta": "auto:FILE". Temperature 0 only.',
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="default: the packaged model")
    add("--draft", metavar="DRAFT", help="ngram (default), suffix, mtp or a model")
    add("--num-speculative-tokens", type=int, metavar="K", help="default 4")
    loss = parser.add_mutually_exclusive_group()
    loss.add_argument("--budget", type=float, metavar="NATS",
        help="allowed loss per token; default 0.01")  # fmt: skip
    loss.add_argument("--recovery", type=float, metavar="SHARE",
        help="share of the strict answers' task score to keep, instead of a budget in "
        "nats")  # fmt: skip
    add("--min-solved", type=int, metavar="N",
        help="with --recovery: held-out tasks that strict decoding must solve; default 30, since "
        "fewer cannot show what is kept")  # fmt: skip
    add("--metric", metavar="ratio|gap|price", help="default ratio")
    add("--prompts", type=Path, metavar="FILE",
        help="JSON lines with 'prompt' or 'turns', at least 100 if possible; every second one is "
        "held out. With --recovery, lines with a task, as for `vllm-mars sweep`. Default: a few "
        "packaged ones, which show how it works")  # fmt: skip
    add("--max-tokens", type=int, metavar="N", help="longest answer; default 128")
    add("--output", type=Path, metavar="FILE", help="default build/calibration.json")
    add("--server-arg", dest="engine_args", action="append", metavar="ARG",
        help="one more engine argument of vLLM, such as --server-arg=--max-model-len=1024; "
        "repeatable")  # fmt: skip


def run(**options: Any) -> int:
    """Runs the command and returns 0."""
    from rich.console import Console

    from vllm_mars.experiments.calibrate.options import CalibrateOptions
    from vllm_mars.experiments.calibrate.result import print_calibration
    from vllm_mars.experiments.calibrate.search import run_calibrate
    from vllm_mars.experiments.sweep.datasets import PACKAGED_TASKS

    if "recovery" in options:
        options.setdefault("prompts", PACKAGED_TASKS)
    elif "min_solved" in options:
        raise ValueError(
            f"min_solved={options['min_solved']} belongs to --recovery; give both or neither."
        )
    print_calibration(run_calibrate(CalibrateOptions(**options)), Console())
    return 0
