"""Drafts: their names, and how vLLM is told to use them."""

import json
from pathlib import Path
from typing import Any

from vllm_mars.options.config import METHOD

NGRAM = "ngram"
# vLLM's, without the number of tokens.
NGRAM_CONFIG = {"method": NGRAM, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
# The same of all drafts that have no files of their own: looked up in the text, or by layers that
# the target brings.
WITHOUT_FILES: dict[str, dict[str, Any]] = {
    NGRAM: NGRAM_CONFIG,
    # It would find the answer to a prompt that was asked before, as each rule and pass asks it.
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    "mtp": {"method": "mtp"},
}

# The setting of servers that this project starts where nobody names another, by measurement
# (docs/results.md): what an answer may lose, from which each request's price follows.
RECOMMENDED: dict[str, Any] = {"rejection_sample_method": METHOD, "mars_max_loss": 0.02}


def draft_config(draft: str) -> dict[str, Any]:
    """vLLM's speculative config of a draft, without the number of tokens.

    Args:
        draft: "ngram", "suffix", "mtp", or the directory or name of a draft model or an EAGLE-3
            head.

    Raises:
        ValueError: the directory has no config.json that can be read.
    """
    if draft in WITHOUT_FILES:
        return dict(WITHOUT_FILES[draft])
    if not Path(draft).is_dir():
        return {"model": draft}
    path = Path(draft) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        architectures = [str(name).lower() for name in config.get("architectures") or []]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"draft={draft} has no config.json that can be read ({error}); give the directory of a "
            f"draft model or an EAGLE-3 head, or one of {', '.join(WITHOUT_FILES)}."
        ) from error
    # vLLM recognises the others by themselves; from a head's directory it cannot tell EAGLE-3.
    is_eagle3 = any("eagle3" in name for name in architectures)
    return {"model": draft, **({"method": "eagle3"} if is_eagle3 else {})}


def drafts_of(draft: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a config has for fixed drafts and for probabilistic ones; nothing if it has no choice.

    vLLM fixes them by default, and MARS draws them.
    """
    if draft in (NGRAM, "suffix"):
        return {}, {}
    return {"draft_sample_method": "greedy"}, {"draft_sample_method": "probabilistic"}


def speculative_config(draft: str, num_speculative_tokens: int, **options: Any) -> dict[str, Any]:
    """vLLM's whole speculative config: `draft_config`, with further options."""
    drafts = {"num_speculative_tokens": num_speculative_tokens, **draft_config(draft)}
    return drafts | options
