"""Conformance with an installed vLLM: `pytest tests/conformance`.

At theta 1 or price 0, MARS must answer exactly as vLLM's sampler, and otherwise as the rule says.
Engines run tiny random models; Model Runner V2 needs Triton, so on a CPU it runs in Triton's
interpreter (tests/interpreter.py).
"""

import pytest

import tiny_models


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders `target`, `draft` (the target's first layer) and `eagle` (a head)."""
    directory = tmp_path_factory.mktemp("models")
    model = tiny_models.llama(directory / "target")
    tiny_models.eagle(directory / "eagle", model)
    tiny_models.first_layer(directory / "draft", model)
    return directory
