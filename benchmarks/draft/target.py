"""Batched decoding with a Llama target that keeps the hidden states an EAGLE-3 head is fed.

The states are those that vLLM hands to `method: "eagle3"`: `aux_layers` counts as vLLM does, so
state i is what layer i takes in (hidden + residual), and state `num_hidden_layers` is what the
final norm takes in. They fall out of decoding, so that no second pass over the text is needed.

transformers computes: the linear layers in bfloat16, which is faster on a core with AVX-512 BF16,
the residual stream in float32. Of its cache, which copies all keys and values at each step, and its
attention, which repeats them for each query head, there are versions here that do not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, Cache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "vllm-mars-grouped"
# Finished rows stay in the batch until this share of it is left.
COMPACT_BELOW = 0.8


@dataclass(frozen=True)
class Sequence:
    """One prompt with its answer.

    Attributes:
        index: place of the prompt in the list that was given.
        tokens: [n] int64, prompt and answer; the last one ends the answer.
        prompt_tokens: how many of them are the prompt's.
        states: [n - 1, len(aux_layers), hidden] bfloat16; states[i] is computed at tokens[i].
    """

    index: int
    tokens: torch.Tensor
    prompt_tokens: int
    states: torch.Tensor


class Target:
    """A Llama checkpoint, read for batched decoding on one device.

    Args:
        directory: Hugging Face directory with config.json and model.safetensors.
        aux_layers: which hidden states to keep, ascending, each in [0, num_hidden_layers].
        device: where to run.
        dtype: type of the linear layers; float32 serves to compare with other implementations.
    """

    def __init__(
        self,
        directory: Path,
        aux_layers: tuple[int, ...],
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        whole = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=ATTENTION
        ).to(device)
        self.config = whole.config
        self.aux_layers = aux_layers
        self.device = device
        self.dtype = dtype
        self.model = whole.model.requires_grad_(False)
        self.layers = self.model.layers
        self.embedding: torch.Tensor = self.model.embed_tokens.weight.data
        self.final_norm: torch.Tensor = self.model.norm.weight.data
        self.lm_head: torch.Tensor = whole.lm_head.weight.data.to(dtype)
        for module in self.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.to(dtype)
        self._states = torch.empty(0)
        for index, layer in enumerate(aux_layers):
            reader = [*self.layers, self.model.norm][layer]
            reader.register_forward_pre_hook(partial(self._keep, index))

    def _keep(self, index: int, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._states[:, :, index] = inputs[0].to(self._states.dtype)

    @torch.inference_mode()
    def answer(
        self,
        prompts: list[list[int]],
        temperatures: list[float],
        max_tokens: int,
        generator: torch.Generator,
    ) -> Iterator[Sequence]:
        """Answers one batch of prompts.

        Args:
            prompts: token ids; of similar length, since shorter ones are padded on the left.
            temperatures: one per prompt; 0 takes the target's first choice.
            max_tokens: longest answer.
            generator: random numbers of the sampled answers.

        Yields:
            Each prompt with its answer, as soon as it ends.
        """
        count, longest = len(prompts), max(map(len, prompts))
        slots = torch.arange(longest + max_tokens, device=self.device)
        tokens = torch.zeros(count, len(slots), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) : longest] = torch.tensor(prompt)
        tokens = tokens.to(self.device)
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=self.device)
        heat = torch.tensor(temperatures, device=self.device)
        states = torch.empty(
            *(count, len(slots), len(self.aux_layers), self.config.hidden_size),
            dtype=torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32,
            device=self.device,
        )
        rows = torch.arange(count, device=self.device)
        live = torch.ones(count, dtype=torch.bool, device=self.device)
        cache = Cache(layers=[_Slots(len(slots)) for _ in self.layers])
        start, end = 0, longest
        while True:
            self._states = states[:, start:end]
            last = self._forward(
                tokens[:, start:end],
                attention_mask=(slots[:end] >= padding[:, None]).long(),
                position_ids=(slots[start:end] - padding[:, None]).clamp(min=0),
                past_key_values=cache,
            )
            chosen = _choose(last, heat, generator)
            tokens[:, end] = chosen
            ended = (chosen == self.config.eos_token_id) | (end == len(slots) - 1)
            for row in torch.nonzero(ended & live).flatten().tolist():
                first = int(padding[row])
                yield Sequence(
                    int(rows[row]),
                    tokens[row, first : end + 1].cpu().clone(),
                    longest - first,
                    states[row, first:end].cpu().clone(),
                )
            live &= ~ended
            if not live.any():
                return
            if live.float().mean() < COMPACT_BELOW:
                keep = torch.nonzero(live).flatten()
                cache.batch_select_indices(keep)
                rows, padding, heat, live = (x[keep] for x in (rows, padding, heat, live))
                tokens, states = tokens[keep], states[keep]
            start, end = end, end + 1

    def _forward(self, tokens: torch.Tensor, **given: Any) -> torch.Tensor:
        """Returns the [rows, vocab] float32 logits after each row's last token."""
        device_type = torch.device(self.device).type
        with torch.autocast(device_type, self.dtype, enabled=self.dtype != torch.float32):
            output = self.model(tokens, use_cache=True, **given)
        last = output.last_hidden_state[:, -1].to(self.dtype)
        return functional.linear(last, self.lm_head).float()

    def normed(self, last_state: torch.Tensor) -> torch.Tensor:
        """Returns what lm_head takes in, of states that the final norm takes in."""
        size, eps = last_state.shape[-1:], self.config.rms_norm_eps
        return functional.rms_norm(last_state.float(), size, self.final_norm, eps).to(self.dtype)


class _Slots(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values, in room for all that will come."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads, _, width = value_states.shape
        # Rotation leaves keys in float32; values have the type of the linear layers.
        self.room = value_states.new_zeros(2, rows, heads, self.capacity, width)
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        self.room[0, :, :, start : self.length] = key_states
        self.room[1, :, :, start : self.length] = value_states
        keys, values = self.room[:, :, :, : self.length]
        return keys, values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.room = self.room[:, indices]


def _grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in which heads that share keys are further queries of one head."""
    rows, heads, length, width = query.shape
    groups = heads // key.shape[1]
    attended = functional.scaled_dot_product_attention(
        query.to(key.dtype).reshape(rows, -1, groups * length, width),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, groups, 1),
        scale=given["scaling"],
    )
    return attended.reshape(rows, heads, length, width).transpose(1, 2), None


def _mask(**given: Any) -> torch.Tensor:
    mask: torch.Tensor = sdpa_mask(**{**given, "allow_is_causal_skip": False})
    return mask


AttentionInterface.register(ATTENTION, _grouped_attention)
AttentionMaskInterface.register(ATTENTION, _mask)


def _choose(
    logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Returns the first choice where the temperature is 0, else a sample."""
    chosen = logits.argmax(-1)
    hot = torch.nonzero(temperatures > 0).flatten()
    if len(hot):
        # One random number per row; torch.multinomial draws one per token of the vocabulary.
        sums = (logits[hot] / temperatures[hot, None]).softmax(-1).cumsum(-1)
        drawn = torch.rand(len(hot), 1, generator=generator, device=logits.device)
        last = logits.shape[-1] - 1
        chosen[hot] = torch.searchsorted(sums, drawn * sums[:, -1:]).flatten().clamp(max=last)
    return chosen
