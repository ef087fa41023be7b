"""The arguments of `vllm-mars report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEEDED = ("jinja2", "matplotlib", "pydantic", "scipy")


def add_parser(commands: Any) -> None:
    """Adds the command to `vllm-mars`."""
    parser = commands.add_parser(
        "report",
        help="make one HTML page of sweeps",
        description="Makes one self-contained HTML page of files that `vllm-mars sweep` wrote. "
        "It begins with what to set, or with what is missing and the command that measures it.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="file of a sweep")
    add("--output", type=Path, metavar="FILE", default=Path("build/report.html"),
        help="default build/report.html")  # fmt: skip


def run(runs: Sequence[Path], output: Path) -> int:
    """Runs the command and returns 0."""
    from vllm_mars.experiments.report.page import write_report

    write_report(runs, output)
    print(f"wrote {output}")
    return 0
