"""Fixtures of the tests on a GPU."""

import pytest

from vllm_mars.kernels import launch


@pytest.fixture(autouse=True)
def checked_launches(monkeypatch):
    """Checks each cached launch against Triton's choice."""
    monkeypatch.setattr(launch, "CHECKS", True)
