"""Runs the checks of the samplers in a process whose Triton is the interpreter."""

import pytest

from interpreter import run_checks

NAMES = ("sampler_v2", "runner_v2", "distribution_v2")
CHECKS = [f"conformance/check_{name}.py" for name in NAMES]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    ("selection", "at_least"),
    [("not nightly", 72), pytest.param("nightly", 40, marks=pytest.mark.nightly)],
)
def test_sampler_v2(selection, at_least):
    run_checks(CHECKS, selection, at_least, with_vllm=True)
