"""The arguments of `vllm-mars report`."""

from pathlib import Path
from typing import Any

NEEDED = ("jinja2", "matplotlib", "pydantic", "scipy")


def add_parser(commands: Any) -> None:
    """Adds the command to `vllm-mars`."""
    parser = commands.add_parser(
        "report",
        help="make one HTML page of a sweep",
        description="Makes one self-contained HTML page of a file that `vllm-mars sweep` wrote: "
        "what to set, speed by loss, and the table.",
    )
    add = parser.add_argument
    add("sweep", type=Path, metavar="FILE", help="file of a sweep")
    add("--max-loss", type=float, metavar="NATS",
        help="the most per token that a recommended rule may lose; default 0.025")  # fmt: skip
    add("--output", type=Path, metavar="FILE", default=Path("build/report.html"),
        help="default build/report.html")  # fmt: skip


def run(sweep: Path, output: Path, **options: float) -> int:
    """Runs the command and returns 0."""
    from vllm_mars.experiments.report import write_report

    write_report(sweep, output, **options)
    print(f"wrote {output}")
    return 0
