"""How long the tests take, by day and by night, from what pytest wrote of both runs.

    make test && make nightly
    python -m benchmarks.ci_times --output benchmarks/results/ci-times.json

Without a run of the night the file has the day only. The run of the day and this command belong
to one commit, and both runs to one machine with nothing else to do: the file names what it finds
when it is written. --night-commit names a night's that is another. Which tests are slow pytest
tells itself (--durations).
"""

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from vllm_mars.local.provenance import describe_run, vllm_device
from vllm_mars.local.result_file import write_json


def summary(report: Path) -> dict[str, Any]:
    """Sums up what `pytest --junitxml` wrote of one run.

    Returns:
        Seconds of wall time, numbers of tests by outcome, and the tests that failed.
    """
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    return {
        "started": suite.get("timestamp"),
        "wall_seconds": float(suite.get("time", 0)),
        **{name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")},
        "failed": [
            f"{case.get('classname')}::{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ],
    }


def main() -> int:
    """Writes the file; returns 1 if the run of the day is missing."""
    parser = argparse.ArgumentParser(description="How long the tests take.")
    parser.add_argument("--day", type=Path, default="build/test.xml", help="of `make test`")
    parser.add_argument("--night", type=Path, default="build/nightly.xml", help="of `make nightly`")
    parser.add_argument("--night-commit", help="of the night's run, where it is not this one")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    given = parser.parse_args()
    runs = {}
    for name, report in (("day", given.day), ("night", given.night)):
        if not report.exists() and name == "night":
            print(f"{report} is missing; the file has the day only", file=sys.stderr)
            continue
        if not report.exists():
            print(f"error: {report} is missing; run its tests first", file=sys.stderr)
            return 1
        runs[name] = summary(report)
        for test in runs[name]["failed"]:
            print(f"{report} has a failed test, which the file will name: {test}", file=sys.stderr)
    if given.night_commit and "night" in runs:
        runs["night"]["git_commit"] = given.night_commit
    _, gpu = vllm_device()
    write_json(given.output, {"schema": 1, **describe_run(gpu), **runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
