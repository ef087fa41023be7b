"""EAGLE-3 heads: the packaged model's, and refusing a wrong or broken one before a server.

vLLM would load a head of another target of the same sizes without a word, and draft nonsense. The
heads of `benchmarks.draft` therefore carry what they were made for, in config.json:

    "vllm_mars_target": {"sha256": ..., "vocab_size": ..., "hidden_size": ...}
    "vllm_mars_weights_sha256": ...
"""

import json
from pathlib import Path
from typing import Any

from vllm_mars.local.packaged_model import MANIFEST, damage, sha256

TARGET_KEY = "vllm_mars_target"
WEIGHTS_KEY = "vllm_mars_weights_sha256"
WEIGHTS = "model.safetensors"
PACKAGED_HEAD = Path(__file__).with_name("heads") / "smollm2-135m-eagle3"
WAY_OUT = "take another, train one in a checkout (docs/draft.md), or draft with ngram"


def is_head(directory: Path) -> bool:
    """Whether `check_head` must look at a draft before a server does.

    So it is with a directory whose config.json names a head of this project, or cannot be read.
    """
    if not directory.is_dir():
        return False
    try:
        return TARGET_KEY in json.loads((directory / "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return True


def check_head(directory: Path, model: Path) -> None:
    """Checks that a head is whole and made for a model.

    Raises:
        ValueError: a file is missing, cut or changed, or the head is for another target.
    """
    config = _config(directory)
    target, weights = config[TARGET_KEY], directory / WEIGHTS
    try:
        checksum = sha256(weights)
    except OSError as error:
        raise ValueError(
            f"draft={directory} has no {WEIGHTS} that can be read: {error}; {WAY_OUT}."
        ) from error
    if checksum != config[WEIGHTS_KEY]:
        size = weights.stat().st_size
        raise ValueError(
            f"draft={directory} is damaged: its {WEIGHTS} of {size} bytes has sha256 {checksum}, "
            f"and config.json says {config[WEIGHTS_KEY]}; copy it again, or {WAY_OUT}."
        )
    try:
        found = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"draft={directory} cannot be compared with model={model}: {error}; "
            "give the model's directory."
        ) from error
    for name in ("vocab_size", "hidden_size"):
        if found.get(name) != target[name]:
            raise ValueError(
                f"draft={directory} was made for a target with {name} {target[name]}, and "
                f"{model} has {found.get(name)}; {WAY_OUT}."
            )
    checksum = model_checksum(model)
    if checksum != target["sha256"]:
        raise ValueError(
            f"draft={directory} was made for a target whose {WEIGHTS} has sha256 "
            f"{target['sha256']}, and that of {model} has {checksum}; {WAY_OUT}."
        )


def model_checksum(model: Path) -> str:
    """Returns the sha256 of a model's weights, from its manifest where vllm-mars made it.

    Raises:
        ValueError: there is no model.safetensors.
    """
    if not (model / WEIGHTS).is_file():
        raise ValueError(f"model={model} has no {WEIGHTS}; give the directory of such a model.")
    if (model / MANIFEST).is_file() and damage(model) is None:
        checksum: str = json.loads((model / MANIFEST).read_text())["files"][WEIGHTS]["sha256"]
        return checksum
    return sha256(model / WEIGHTS)


def _config(directory: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        target, method = config[TARGET_KEY], config["speculators_config"]["proposal_methods"][0]
        for value, kind in (
            (target["sha256"], str),
            (target["vocab_size"], int),
            (target["hidden_size"], int),
            (config[WEIGHTS_KEY], str),
            (method["speculative_tokens"], int),
        ):
            if not isinstance(value, kind):
                raise TypeError(f"values of wrong types under {TARGET_KEY}")
        if (most := method["speculative_tokens"]) < 1:
            raise ValueError(f"speculative_tokens={most} is below 1")
    except OSError as error:
        raise ValueError(
            f"draft={directory} has no config.json that can be read: {error}; {WAY_OUT}."
        ) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"draft={directory} is not an EAGLE-3 head of vllm-mars: config.json is broken or "
            f"lacks {TARGET_KEY} ({error!r}); {WAY_OUT}."
        ) from error
    return config
