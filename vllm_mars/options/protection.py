"""Tokens of a model at which verification is strict by default."""

import re
from typing import TYPE_CHECKING

from vllm_mars.options.config import MarsConfig

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# Tool and thinking markers such as <tool_call> or [/THINK] are often added tokens without the
# tokenizer's special flag. Added tokens of any other form, such as runs of spaces, are text.
_MARKER = re.compile(r"[<\[].*[>\]]", re.DOTALL)
# A draft model can prefer comments and docstrings, which would make relaxed code longer.
# In a vocabulary Ġ, Ċ, ĉ and č are white space of byte-level BPE, and ▁ is SentencePiece's space.
_COMMENT = re.compile(r"""[\sĠĊĉč▁]*(#{1,3}|//|/\*\*?|<!--|\"{3}|'{3})[\sĠĊĉč▁]*""")


def protected_token_ids(config: MarsConfig, vllm_config: "VllmConfig") -> list[int]:
    """Returns the sorted ids of the protected tokens for options with resolved markers.

    By default these are the end-of-sequence ids, the tokenizer's special tokens, its added markers,
    and section markers even if they are ordinary vocabulary. With a price or a bound they include
    the tokens that open a comment or docstring.
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
    if not config.rule.outright:
        ids |= _comment_openers(model_config)
    return sorted(ids)


def _comment_openers(model_config: "ModelConfig") -> set[int]:
    """Returns the ids of tokens such as ` #` and `//` that open a comment or docstring."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    vocab = {} if tokenizer is None else tokenizer.get_vocab()
    return {token_id for text, token_id in vocab.items() if _COMMENT.fullmatch(text)}


def special_tokens(model_config: "ModelConfig") -> dict[str, int]:
    """Returns the ids of a tokenizer's special tokens and added markers, by text."""
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
    """Returns the ids that begin or end a strict span or the thinking section."""
    spans = {token for span in config.strict_spans or () for token in span}
    thinking = {config.thinking_start, config.thinking_end}
    return {token for token in spans | thinking if isinstance(token, int)}
