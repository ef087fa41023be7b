"""A short soak: mixed load on a real server, no request left, a clean end by SIGTERM under load."""

import sys

import pytest

import soak


@pytest.mark.nightly
@pytest.mark.engine
def test_a_short_soak(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["soak.py", "--minutes", "0.75"])
    assert soak.main() == 0
