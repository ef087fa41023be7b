"""What a step launches on an accelerator, counted on the meta device."""

import json
import subprocess
import sys


def test_a_step_with_everything_on_costs_little_more_than_a_bare_one():
    command = [sys.executable, "-m", "benchmarks.launches"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    lines = [json.loads(line) for line in found.splitlines() if line.startswith("{")]
    steps = {(line["runner"], *line["case"].rsplit(", ", 1)): line for line in lines}
    assert len(steps) == 24
    for (runner, case, kind), step in steps.items():
        assert step["syncs"] == 0
        launches, of_vllm = step["launches"], step["vllm"]
        is_bare = case in ("theta", "price")
        if kind == "greedy":
            # On V1 one is the copy of what the host alone knows.
            assert launches == 2 + (runner == "v1") + (not is_bare), (runner, case)
        else:
            assert launches <= of_vllm + 4, (runner, case)
