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
        room = self.new_room(count, len(slots))
        start, end = 0, longest
        while True:
            self._states = states[:, start:end]
            new, sees = slots[start:end], (slots[:end] >= padding[:, None])[:, None, None]
            last = self._forward(
                tokens[:, start:end],
                attention_mask=sees & (slots[:end] <= new[:, None]),
                position_ids=(new - padding[:, None]).clamp(min=0),
                past_key_values=room.at(torch.arange(len(rows), device=self.device), new),
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
                room.content = room.content[:, :, keep]
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

    def new_room(self, rows: int, capacity: int) -> "Room":
        """Room for the keys and values of so many prompts of so many tokens."""
        heads, width = self.config.num_key_value_heads, self.config.head_dim
        shape = (len(self.layers), 2, rows, heads, capacity, width)
        return Room(*shape, dtype=self.dtype, device=self.device)

    def normed(self, last_state: torch.Tensor) -> torch.Tensor:
        """Returns what lm_head takes in, of states that the final norm takes in."""
        size, eps = last_state.shape[-1:], self.config.rms_norm_eps
        return functional.rms_norm(last_state.float(), size, self.final_norm, eps).to(self.dtype)


class Room(Cache):  # type: ignore[misc]
    """Keys and values, in room for all that will come.

    Args:
        shape: `[layers, 2, rows, heads, capacity, width]`.
        dtype: of what is kept; keys come in float32 from their rotation.
        device: where it is.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: str) -> None:
        super().__init__(layers=[])
        self.content = torch.zeros(shape, dtype=dtype, device=device)

    def at(self, rows: torch.Tensor, slots: torch.Tensor) -> "Room":
        """Says where the next tokens go; rows ascend, slots are `[rows, tokens]` or `[tokens]`."""
        self.rows, self.slots, self.used = rows, slots, int(slots.max()) + 1
        return self

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.content[layer]
        for kept, new in zip(own, (keys, values), strict=True):
            kept[self.rows[:, None], :, self.slots] = new.transpose(1, 2).to(own.dtype)
        known = own[..., : self.used, :]
        # Only rows that are left out are worth a copy of the others.
        all_keys, all_values = known if len(self.rows) == own.shape[1] else known[:, self.rows]
        return all_keys, all_values


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


AttentionInterface.register(ATTENTION, _grouped_attention)


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
