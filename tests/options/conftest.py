"""Warnings of the modules that look at a model's tokenizer."""

import pytest


@pytest.fixture
def warnings(monkeypatch):
    """Warnings of `markers` and `prompts`, with their arguments filled in."""
    from vllm.logger import init_logger

    messages = []
    for module in ("markers", "prompts"):
        logger = init_logger(f"vllm.vllm_mars.options.{module}")
        monkeypatch.setattr(logger, "warning", lambda text, *args: messages.append(text % args))
    return messages
