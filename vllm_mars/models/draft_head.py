"""Checks of EAGLE-3 heads before a server starts.

vLLM would silently load a head that was made for another target of the same sizes. So config.json
of the packaged head names its target:

    "vllm_mars_target": {"sha256": ..., "vocab_size": ..., "hidden_size": ...}
    "vllm_mars_weights_sha256": ...
"""

import json
from pathlib import Path

from vllm_mars.models.packaged_model import MANIFEST, damage, sha256

TARGET_KEY = "vllm_mars_target"
WEIGHTS_KEY = "vllm_mars_weights_sha256"
WEIGHTS = "model.safetensors"
PACKAGED_HEAD = Path(__file__).with_name("heads") / "smollm2-135m-eagle3"
WAY_OUT = "take another, or draft with ngram"


def check_head(directory: Path, model: Path) -> None:
    """Raises ValueError if a head of this project is damaged or made for another target."""
    config = json.loads((directory / "config.json").read_text())
    if TARGET_KEY not in config:
        return
    if (actual := checksum(directory)) != (wanted := config.get(WEIGHTS_KEY)):
        raise ValueError(
            f"draft={directory} is damaged: its {WEIGHTS} has sha256 {actual}, and config.json "
            f"says {wanted}; copy it again, or {WAY_OUT}."
        )
    if (actual := checksum(model)) != (wanted := config[TARGET_KEY].get("sha256")):
        raise ValueError(
            f"draft={directory} was made for a target whose {WEIGHTS} has sha256 {wanted}, and "
            f"that of {model} has {actual}; {WAY_OUT}."
        )


def checksum(directory: Path) -> str:
    """Returns the sha256 of model.safetensors, from the manifest if there is one."""
    if not (directory / WEIGHTS).is_file():
        raise ValueError(f"{directory} has no {WEIGHTS}; give a directory that has, or {WAY_OUT}.")
    if (directory / MANIFEST).is_file() and damage(directory) is None:
        files = json.loads((directory / MANIFEST).read_text())["files"]
        return str(files[WEIGHTS]["sha256"])
    return sha256(directory / WEIGHTS)
