"""The arguments of `vllm-mars report`."""

import argparse
from pathlib import Path
from typing import Any

NEEDED = ("jinja2", "matplotlib", "pydantic", "scipy")


def add_parser(commands: Any) -> None:
    """Adds the command to `vllm-mars`."""
    parser = commands.add_parser(
        "report",
        help="make one HTML page, and PNGs, of sweeps and calibrations",
        description="Makes one self-contained HTML page of files that `vllm-mars sweep` (.jsonl) "
        "and `vllm-mars calibrate` (.json) wrote, and a PNG of each plot. A section without data "
        "says which command gives it.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a sweep or calibration")
    parser.add_argument("--output", type=Path, metavar="FILE", default=Path("build/report.html"))
    parser.add_argument(
        "--png", type=Path, metavar="DIR", help="where PNGs go; default build/report for the above"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns 0."""
    from vllm_mars.experiments.report.page import write_report

    plots = write_report(args.runs, args.output, args.png)
    print(f"wrote {args.output} and {plots} PNGs")
    return 0
