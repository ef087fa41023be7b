"""Tiny models with random weights: targets, and drafts of each kind."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB = 512
# vLLM's CPU attention needs heads of at least 32.
HIDDEN = 128
NUM_DRAFT_TOKENS = 3


def llama(directory: Path, added: float = 0.05) -> LlamaForCausalLM:
    """Writes a two-layer Llama target and returns it.

    If `added`, the weight of its layers, is tiny, a token depends only on the one before: answers
    repeat themselves, and n-grams are good drafts.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**_SHAPE))
    _make_guessable(model, added)
    model.save_pretrained(directory)
    return model


def first_layer(directory: Path, target: LlamaForCausalLM) -> None:
    """Writes a draft model of the target's first layer."""
    draft = copy.deepcopy(target)
    draft.model.layers = draft.model.layers[:1]
    draft.config.num_hidden_layers = 1
    draft.save_pretrained(directory)


def tokenizer(directory: Path, of_bytes: bool = False, ends: str = "") -> None:
    """Writes a tokenizer into a target's directory.

    Args:
        of_bytes: encodes bytes, as grammars need, instead of words; words then occur in answers.
        ends: text after each message of a chat.
    """
    words = ["<unk>", "<s>", "</s>", "user", "assistant"]
    words += sorted(ByteLevel.alphabet()) if of_bytes else []
    words += [f"w{number}" for number in range(len(words), VOCAB)]
    vocab = {word: number for number, word in enumerate(words)}
    built = Tokenizer(BPE(vocab, []) if of_bytes else WordLevel(vocab, "<unk>"))
    built.pre_tokenizer = ByteLevel(add_prefix_space=False) if of_bytes else WhitespaceSplit()
    if of_bytes:
        built.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = (
        "{% for message in messages %}{{ message.role + ' ' + message.content + ' ' }}"
        + ends
        + "{% endfor %}{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
    )
    fast.save_pretrained(directory)


def eagle(directory: Path, target: LlamaForCausalLM) -> None:
    """Writes an EAGLE head that predicts the token's embedding with noise."""
    prefix = "model.layers.0."
    # An EAGLE layer has no input norm.
    tensors = {
        name.removeprefix("model."): tensor.contiguous()
        for name, tensor in target.state_dict().items()
        if name.startswith(prefix) and "input_layernorm" not in name
    }
    blurred = torch.eye(HIDDEN) + 0.02 * torch.randn(HIDDEN, HIDDEN)
    tensors["fc.weight"] = torch.cat([blurred, torch.zeros(HIDDEN, HIDDEN)], 1)
    config = {
        **target.config.to_dict(),
        "architectures": ["EagleLlamaForCausalLM"],
        "num_hidden_layers": 1,
    }
    _write(directory, tensors, config)


def medusa(directory: Path, target: LlamaForCausalLM) -> None:
    """Writes Medusa heads with the target's output weights."""
    tensors = {}
    for head in range(NUM_DRAFT_TOKENS):
        tensors[f"blocks.{head}.layers.0.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"blocks.{head}.layers.0.bias"] = torch.zeros(HIDDEN)
        tensors[f"lm_heads.{head}.weight"] = target.lm_head.weight.detach().clone()
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "truncated_vocab_size": VOCAB,
        "num_heads": NUM_DRAFT_TOKENS,
        "num_hidden_layers": 1,
        "original_lm_head": False,
    }
    _write(directory, tensors, config)


def mimo(directory: Path) -> None:
    """Writes a MiMo target, which includes an MTP layer.

    Layers add little, as in `llama`, and the MTP layer predicts the token's embedding with noise.
    """
    torch.manual_seed(0)
    config = Qwen2Config(
        **{name: value for name, value in _SHAPE.items() if name != "head_dim"},
        tie_word_embeddings=False,
        num_nextn_predict_layers=1,
    )
    model = Qwen2ForCausalLM(config)
    _make_guessable(model)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    mtp = "model.mtp_layers.0."
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers.0."):
            tensors[name.replace("model.layers.0.", mtp)] = tensor.clone()
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{mtp}{norm}.weight"] = torch.ones(HIDDEN)
    # Scales to an embedding's size, which the copied layer expects.
    tensors[f"{mtp}token_layernorm.weight"] *= config.initializer_range
    blurred = torch.eye(HIDDEN) + 0.02 * torch.randn(HIDDEN, HIDDEN)
    tensors[f"{mtp}input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), blurred], 1)
    _write(directory, tensors, {**config.to_dict(), "architectures": ["MiMoForCausalLM"]})


def dflash(directory: Path, target: LlamaForCausalLM, kind: str) -> None:
    """Writes a one-layer draft model that drafts all tokens at once, from the target's weights.

    Args:
        kind: "dflash"; "dflash2", which selects among a few candidates by the previous token; or
            "dspark", which adds logits that depend on the previous token, and whose vocabulary is
            the first half of the target's.
    """
    first = "model.layers.0."
    tensors = {
        name.removeprefix("model."): tensor.contiguous()
        for name, tensor in target.state_dict().items()
        if name.startswith(first)
    }
    for norm in ("layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm"):
        tensors[f"{norm}.weight"] = torch.ones(_SHAPE["head_dim"])
    tensors |= {"hidden_norm.weight": torch.ones(HIDDEN), "norm.weight": torch.ones(HIDDEN)}
    tensors["fc.weight"] = torch.eye(HIDDEN)
    options: dict[str, object] = {"mask_token_id": 4, "target_layer_ids": [0], "causal": True}
    head = target.lm_head.weight.detach()
    embedding = torch.nn.functional.rms_norm(target.model.embed_tokens.weight.detach(), (HIDDEN,))
    config = {**_SHAPE, "num_hidden_layers": 1, "model_type": "qwen3", "dflash_config": options}
    if kind == "dflash2":
        options |= {"conv_kernel_size": 2, "conv_group_size": HIDDEN, "selector_top_k": 8}
        options["selector_rank"] = HIDDEN
        for conv in ("attention_conv", "mlp_conv"):
            tensors[f"layers.0.{conv}.base_kernel"] = torch.ones(2, 2, HIDDEN) / 2
            tensors[f"layers.0.{conv}.kernel_projection.weight"] = torch.zeros(4, HIDDEN)
        tensors["candidate_selector.predecessor_codebook"] = embedding
        tensors["candidate_selector.successor_codebook"] = head.clone()
        tensors["candidate_selector.hidden_projection.weight"] = torch.eye(HIDDEN)
    if kind == "dspark":
        half = VOCAB // 2
        config |= {"markov_rank": HIDDEN, "draft_vocab_size": half}
        tensors["markov_head.markov_w1.weight"] = embedding
        tensors["markov_head.markov_w2.weight"] = head[:half].clone()
        # Only the previous token determines the logits.
        tensors["norm.weight"] = torch.zeros(HIDDEN)
        tensors |= {"lm_head.weight": head[:half].clone(), "d2t": torch.zeros(half).long()}
    kinds = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
    _write(directory, tensors, {**config, "architectures": [kinds.get(kind, "Qwen3DSparkModel")]})


def _make_guessable(model: LlamaForCausalLM | Qwen2ForCausalLM, added: float = 0.05) -> None:
    """Scales the layers down, so that an untrained draft can guess hidden states."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(added)
            layer.mlp.down_proj.weight.mul_(added)


def _write(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Wide logits give small and large margins.
    "initializer_range": 0.2,
}
