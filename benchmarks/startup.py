"""What the installed plugin costs a server that does not ask for MARS: its imports at start.

`python -m benchmarks.startup --output benchmarks/results/startup-cpu.json`

Each run is a new process that imports what vLLM's API server has loaded when it loads plugins, and
then times the plugin's import and registration. Nothing of the plugin runs in a step: where MARS is
not asked for, its hooks wrap the start of an engine and the admission of a request.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

from vllm_mars.local.provenance import ask_vllm, describe_run
from vllm_mars.local.result_file import write_json

PROBE = """
import json, sys, time
import vllm.engine.arg_utils
modules = len(sys.modules)
start = time.perf_counter()
from vllm_mars.plugin import register
register()
took = time.perf_counter() - start
print(json.dumps({"ms": 1e3 * took, "modules": len(sys.modules) - modules}))
"""


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--output", type=Path, help="JSON file; default: standard output only")
    args = parser.parse_args()
    # vLLM must not load the plugin itself before the clock runs.
    os.environ |= {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    probes = [ask_vllm(PROBE) for _ in range(args.runs)]
    milliseconds, modules = [probe["ms"] for probe in probes], probes[-1]["modules"]
    median = statistics.median(milliseconds)
    print(f"plugin: {median:.1f} ms (median of {args.runs} processes), {modules} modules")
    if args.output:
        result = {
            "schema": "vllm-mars/startup/1",
            **describe_run(None),
            "median_ms": median,
            "runs_ms": milliseconds,
            "modules": modules,
        }
        write_json(args.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
