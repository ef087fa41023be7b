"""Writes a head as vLLM's `method: "eagle3"` loads it, in the layout of the speculators library.

    model.safetensors     bfloat16; fc, fc_norm, layers.0, norm, lm_head, d2t
    config.json           sizes; what is fed and how; the target's checksum and sizes

`d2t[i]` is the target's id of draft token i, minus i. The embedding is left out: vLLM then shares
the target's.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig

from benchmarks.draft.data import replacing
from benchmarks.draft.head import Eagle3Head
from vllm_mars.local.draft_head import TARGET_KEY, WEIGHTS_KEY
from vllm_mars.local.packaged_model import sha256
from vllm_mars.local.result_file import write_json

VERSION = "0.9.0"
# Of the head's layer.
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
)


def export(
    head: Eagle3Head,
    directory: Path,
    *,
    target_name: str,
    target_sha256: str,
    num_speculative_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes the head, complete or not at all.

    Args:
        head: what to write.
        directory: made if it is missing; files there are replaced.
        target_name: the target's name, for readers.
        target_sha256: checksum of the target's model.safetensors; the head is refused for others.
        num_speculative_tokens: how many tokens to draft if the user does not say.
        dtype: type of the weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(dtype).cpu().contiguous()
        for name, tensor in head.state_dict().items()
    }
    ids = head.draft_tokens.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    content = describe(head, target_name, target_sha256, num_speculative_tokens)
    with replacing(directory / "model.safetensors") as unfinished:
        save_file(tensors, unfinished)
        unfinished.chmod(0o644)
        content[WEIGHTS_KEY] = sha256(unfinished)
    write_json(directory / "config.json", content)


def megabytes(head: Eagle3Head) -> float:
    """Returns the size of an exported head's tensors in MB of 10^6 bytes."""
    weights: int = sum(tensor.numel() for tensor in head.state_dict().values())
    return (2 * weights + 8 * len(head.draft_tokens)) / 1e6


def describe(
    head: Eagle3Head, target_name: str, target_sha256: str, num_speculative_tokens: int
) -> dict[str, Any]:
    """Returns the content of config.json."""
    config = head.config
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": len(head.draft_tokens),
        "target_hidden_size": config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}
            ],
            "verifier": {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]},
        },
        TARGET_KEY: {
            "sha256": target_sha256,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
        },
        "transformer_layer_config": {
            "model_type": "llama",
            **{name: getattr(config, name) for name in SIZES},
            "num_hidden_layers": 1,
            **{"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": config.rope_parameters["rope_theta"],
            },
            "num_aux_hidden_states": len(config.aux_layers),
            "tie_word_embeddings": False,
        },
    }


def load(directory: Path) -> Eagle3Head:
    """Reads an exported head back, in float32."""
    content = json.loads((directory / "config.json").read_text())
    config = LlamaConfig.from_dict(
        {
            **content["transformer_layer_config"],
            "aux_layers": tuple(content["eagle_aux_hidden_state_layer_ids"]),
        }
    )
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    offsets = tensors.pop("d2t")
    head = Eagle3Head(config, offsets + torch.arange(len(offsets)))
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return head
