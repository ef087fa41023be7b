"""Speculative configs of vLLM by the name of the draft."""

import json
from pathlib import Path
from typing import Any

from vllm_mars.options.config import METHOD

NGRAM = "ngram"
# vLLM's config, without the number of tokens.
NGRAM_CONFIG = {"method": NGRAM, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
# Configs of drafts without files: looked up in the text, or from layers of the target.
WITHOUT_FILES: dict[str, dict[str, Any]] = {
    NGRAM: NGRAM_CONFIG,
    # Cached answers to the same prompts would speed up all rules but the first.
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    "mtp": {"method": "mtp"},
}

# The default of servers that this project starts, chosen by measurement (docs/results.md). Each
# request's price follows from the bound.
RECOMMENDED: dict[str, Any] = {"rejection_sample_method": METHOD, "mars_max_loss": 0.02}


def draft_config(draft: str) -> dict[str, Any]:
    """Returns vLLM's speculative config of a draft, without the number of tokens.

    `draft` is a key of `WITHOUT_FILES`, or the directory or name of a draft model or EAGLE-3 head.
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
    # vLLM detects other methods, but not EAGLE-3 from a head's directory.
    is_eagle3 = any("eagle3" in name for name in architectures)
    return {"model": draft, **({"method": "eagle3"} if is_eagle3 else {})}


def drafts_of(draft: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options of fixed and of probabilistic drafts; {} if there is no choice.

    vLLM drafts fixed tokens by default, MARS probabilistic ones.
    """
    if draft in (NGRAM, "suffix"):
        return {}, {}
    return {"draft_sample_method": "greedy"}, {"draft_sample_method": "probabilistic"}


def speculative_config(draft: str, num_speculative_tokens: int, **options: Any) -> dict[str, Any]:
    drafts = {"num_speculative_tokens": num_speculative_tokens, **draft_config(draft)}
    return drafts | options
