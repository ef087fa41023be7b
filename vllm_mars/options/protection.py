"""Tokens of a model that are no text, at which verification stays strict."""

import re
from typing import TYPE_CHECKING

from vllm_mars.options.config import MarsConfig

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# Tool and thinking markers such as <tool_call> or [/THINK] are often added tokens that the
# tokenizer does not call special. Added tokens of any other form (runs of spaces, say) are ordinary
# text.
_MARKER = re.compile(r"[<\[].*[>\]]", re.DOTALL)


def protected_token_ids(config: MarsConfig, vllm_config: "VllmConfig") -> list[int]:
    """Resolves the ids of the protected tokens for a model.

    Args:
        config: resolved options; ids that the user lists are taken as they are.
        vllm_config: gives the tokenizer, the model's end-of-sequence ids, and the markers of its
            reasoning.

    Returns:
        Sorted ids: the user's, or by default the end-of-sequence ids, the tokenizer's special
        tokens, its added markers, and what marks a section, be it ordinary vocabulary.
    """
    if config.protected_token_ids is not None:
        return sorted(set(config.protected_token_ids))
    model_config = vllm_config.model_config
    ids = {*special_tokens(model_config).values()} | section_markers(config)
    reasoning = vllm_config.reasoning_config
    for source in (
        model_config.try_get_generation_config().get("eos_token_id"),
        getattr(model_config.hf_text_config, "eos_token_id", None),
        getattr(reasoning, "reasoning_start_token_ids", None),
        getattr(reasoning, "natural_reasoning_end_token_ids", None),
    ):
        if source is not None:
            ids.update(source if isinstance(source, list | tuple) else [source])
    return sorted(ids)


def special_tokens(model_config: "ModelConfig") -> dict[str, int]:
    """The special tokens of a model's tokenizer and its added markers, by their text."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        return {}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    markers = {
        token.content: token_id
        for token_id, token in added.items()
        if token.special or _MARKER.fullmatch(token.content)
    }
    return markers | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def section_markers(config: MarsConfig) -> set[int]:
    """The tokens that begin or end a span or the thinking section."""
    spans = {token for span in config.strict_spans or () for token in span}
    thinking = {config.thinking_start, config.thinking_end}
    return {token for token in spans | thinking if isinstance(token, int)}
