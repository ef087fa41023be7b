"""Runs the kernel checks in a process whose Triton is the interpreter."""

import pytest

from interpreter import run_checks

NAMES = ("accept", "clip", "strictness")
CHECKS = [f"interpreted/check_{name}.py" for name in NAMES]
# What a GPU is asked, too.
CHECKS += [f"gpu/test_{name}.py" for name in ("golden_tokens", "chi_square")]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    ("selection", "at_least"),
    [("not nightly", 53), pytest.param("nightly", 8, marks=pytest.mark.nightly)],
)
def test_under_the_interpreter(selection, at_least):
    # The noise of a draw is a device function of vLLM.
    run_checks(CHECKS, selection, at_least, with_vllm=True)
