"""What the tests on a GPU share."""

import pytest

from vllm_mars.kernels import launch


@pytest.fixture(autouse=True)
def checked_launches(monkeypatch):
    """Each launch that is looked up asks Triton, too."""
    monkeypatch.setattr(launch, "CHECKS", True)
