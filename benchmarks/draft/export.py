"""Writes a head as vLLM's `method: "eagle3"` loads it, in the layout of the speculators library.

    model.safetensors     bfloat16; fc, fc_norm, layers.0, norm, lm_head, d2t
    config.json           as the packaged head's, with this head's sizes, target and checksums

`d2t[i]` is the target's id of draft token i, minus i. The embedding is left out: vLLM then shares
the target's.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.draft.head import Eagle3Head
from vllm_mars.lab.result_file import write_json
from vllm_mars.models.draft_head import PACKAGED_HEAD, TARGET_KEY, WEIGHTS_KEY, checksum

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
)


def export(
    head: Eagle3Head,
    directory: Path,
    model: Path,
    *,
    num_speculative_tokens: int = 4,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes the head into a directory; it is refused for other weights than the model's."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = directory / "model.safetensors"
    tensors = {name: tensor.cpu().to(dtype) for name, tensor in head.state_dict().items()}
    ids, config = head.draft_tokens.cpu(), head.config
    save_file(tensors | {"d2t": ids - torch.arange(len(ids))}, weights)
    content = json.loads((PACKAGED_HEAD / "config.json").read_text())
    content["draft_vocab_size"] = len(ids)
    content["target_hidden_size"] = config.hidden_size
    content["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layers)
    speculators = content["speculators_config"]
    speculators["proposal_methods"][0]["speculative_tokens"] = num_speculative_tokens
    speculators["verifier"]["name_or_path"] = model.name
    layer = content["transformer_layer_config"]
    layer |= {name: getattr(config, name) for name in SIZES}
    layer["rope_parameters"]["rope_theta"] = config.rope_parameters["rope_theta"]
    layer["num_aux_hidden_states"] = len(config.aux_layers)
    sizes = {name: getattr(config, name) for name in ("vocab_size", "hidden_size")}
    content[TARGET_KEY] = {"sha256": checksum(model), **sizes}
    content[WEIGHTS_KEY] = checksum(directory)
    write_json(directory / "config.json", content)
