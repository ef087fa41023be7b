"""Protected tokens: those at which verification stays strict."""

import re
from typing import TYPE_CHECKING

from vllm_mars.config import MarsConfig

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# Tool and thinking markers such as <tool_call> or [/THINK] are often added tokens that the
# tokenizer does not call special. Added tokens of any other form (runs of spaces, say) are ordinary
# text.
_MARKER = re.compile(r"[<\[].*[>\]]", re.DOTALL)


def protected_token_ids(config: MarsConfig, model_config: "ModelConfig") -> list[int]:
    """Resolves the ids of the protected tokens for a model.

    Args:
        config: the options; ids that the user lists are taken as they are.
        model_config: vLLM's model configuration, which gives the tokenizer and the model's
            end-of-sequence ids.

    Returns:
        Sorted ids: the user's, or by default the end-of-sequence ids, the tokenizer's special
        tokens and its added markers.
    """
    if config.protected_token_ids is not None:
        return sorted(set(config.protected_token_ids))
    from vllm.tokenizers import cached_tokenizer_from_config

    ids: set[int] = set()
    for source in (
        model_config.try_get_generation_config().get("eos_token_id"),
        getattr(model_config.hf_text_config, "eos_token_id", None),
    ):
        if source is not None:
            ids.update(source if isinstance(source, list | tuple) else [source])
    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is not None:
        ids.update(tokenizer.all_special_ids)
        for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
            if token.special or _MARKER.fullmatch(token.content):
                ids.add(token_id)
    return sorted(ids)
