"""Warnings of the modules that look at a model's tokenizer."""

import pytest

from vllm_mars.options import markers, prompts


@pytest.fixture
def warnings(monkeypatch):
    """Warnings of `markers` and `prompts`, with their arguments filled in."""
    messages = []
    for module in (markers, prompts):
        monkeypatch.setattr(
            module.logger, "warning", lambda text, *args: messages.append(text % args)
        )
    return messages
