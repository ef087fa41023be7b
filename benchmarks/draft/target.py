"""Batched decoding with a Llama target that keeps the hidden states an EAGLE-3 head is fed.

The states are those that vLLM hands to `method: "eagle3"`: `aux_layers` counts as vLLM does, so
state i is what layer i takes in (hidden + residual), and state `num_hidden_layers` is what the
final norm takes in. They fall out of decoding, so that no second pass over the text is needed.

The linear layers run in bfloat16, the residual stream in float32. On one core with AVX-512 BF16
that is 2.2 x float32. transformers' cache is not used: it copies all keys and values each step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import LlamaConfig

# Rows whose prompts are computed at once: bounds the memory of the attention masks.
PREFILL_ROWS = 32
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
        self.config = LlamaConfig.from_pretrained(directory)
        self.aux_layers = aux_layers
        self.device = device
        self.dtype = dtype
        weights = load_file(directory / "model.safetensors", device=device)
        self.embedding = weights["model.embed_tokens.weight"].float()
        self.final_norm = weights["model.norm.weight"].float()
        self.lm_head = weights.get("lm_head.weight", self.embedding).to(dtype)
        self.layers = []
        for index in range(self.config.num_hidden_layers):
            layer = {
                name: weights[f"model.layers.{index}.{name}.weight"]
                for name in (
                    *(f"self_attn.{part}_proj" for part in "qkvo"),
                    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
                    *("input_layernorm", "post_attention_layernorm"),
                )
            }
            self.layers.append(
                {
                    "qkv": torch.cat([layer[f"self_attn.{part}_proj"] for part in "qkv"]).to(dtype),
                    "out": layer["self_attn.o_proj"].to(dtype),
                    "gate_up": torch.cat([layer["mlp.gate_proj"], layer["mlp.up_proj"]]).to(dtype),
                    "down": layer["mlp.down_proj"].to(dtype),
                    "attention_norm": layer["input_layernorm"].float(),
                    "mlp_norm": layer["post_attention_layernorm"].float(),
                }
            )
        head_dim = self.config.head_dim
        base = self.config.rope_parameters["rope_theta"]
        self.frequencies = base ** (
            -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        )

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
        longest = max(map(len, prompts))
        batch = _Batch(self, prompts, longest, longest + max_tokens)
        last = batch.prefill(prompts)
        heat = torch.tensor(temperatures, device=self.device)
        eos = self.config.eos_token_id
        for step in range(max_tokens):
            chosen = _choose(last, heat[batch.rows], generator)
            slot = longest + step
            batch.tokens[:, slot] = chosen
            ended = chosen == eos
            if step == max_tokens - 1:
                ended = torch.ones_like(ended)
            yield from batch.finish(ended, slot)
            if not batch.live.any():
                return
            batch.compact()
            last = batch.step(slot)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: torch.Tensor,
        start: int,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """Runs tokens through the layers.

        Args:
            tokens: [rows, length] int64.
            positions: [rows, length] int64.
            mask: [rows, 1, length, start + length] bool, True where a query may look.
            cache: [layers, 2, rows, kv_heads, slots, head_dim]; slots from `start` are written.
            start: slot of the first token.
            states: [rows, length, len(aux_layers), hidden], written.

        Returns:
            [rows, vocab] logits at the last token of each row.
        """
        config = self.config
        rows, length = tokens.shape
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        group, head_dim = heads // kv_heads, config.head_dim
        angles = positions[..., None].float() * self.frequencies
        cos = torch.cat([angles.cos()] * 2, -1)[:, None]
        sin = torch.cat([angles.sin()] * 2, -1)[:, None]
        end = start + length
        residual = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            self._keep(index, residual, states)
            qkv = functional.linear(self._norm(residual, layer["attention_norm"]), layer["qkv"])
            qkv = qkv.view(rows, length, heads + 2 * kv_heads, head_dim).transpose(1, 2)
            query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
            cache[index, 0, :, :, start:end] = rotate(key.float(), cos, sin).to(self.dtype)
            cache[index, 1, :, :, start:end] = value
            query = rotate(query.float(), cos, sin).to(self.dtype)
            # Heads that share keys become further queries of one head, so nothing is repeated.
            query = query.reshape(rows, kv_heads, group * length, head_dim)
            attended = functional.scaled_dot_product_attention(
                query,
                cache[index, 0, :, :, :end],
                cache[index, 1, :, :, :end],
                attn_mask=mask if length == 1 else mask.repeat(1, 1, group, 1),
            )
            attended = attended.view(rows, heads, length, head_dim).transpose(1, 2)
            attended = attended.reshape(rows, length, heads * head_dim)
            residual = residual + functional.linear(attended, layer["out"])
            gate, up = functional.linear(
                self._norm(residual, layer["mlp_norm"]), layer["gate_up"]
            ).chunk(2, -1)
            residual = residual + functional.linear(functional.silu(gate) * up, layer["down"])
        self._keep(len(self.layers), residual, states)
        return self.logits(residual[:, -1])

    def logits(self, last_state: torch.Tensor) -> torch.Tensor:
        """Returns the logits of states that the final norm takes in, [rows, vocab] float32."""
        return functional.linear(self.normed(last_state), self.lm_head).float()

    def normed(self, last_state: torch.Tensor) -> torch.Tensor:
        """Returns what lm_head takes in, of states that the final norm takes in."""
        return self._norm(last_state.float(), self.final_norm)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        size = (hidden.shape[-1],)
        return functional.rms_norm(hidden, size, weight, self.config.rms_norm_eps).to(self.dtype)

    def _keep(self, index: int, residual: torch.Tensor, states: torch.Tensor) -> None:
        if index in self.aux_layers:
            states[:, :, self.aux_layers.index(index)] = residual.to(states.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves as in Llama checkpoints of transformers."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


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


class _Batch:
    """The rows that are still being answered; slot s of a row is its s-th token with padding."""

    def __init__(self, target: Target, prompts: list[list[int]], longest: int, slots: int) -> None:
        config, device = target.config, target.device
        count = len(prompts)
        self.target = target
        self.rows = torch.arange(count, device=device)
        self.live = torch.ones(count, dtype=torch.bool, device=device)
        self.padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        self.longest = longest
        self.tokens = torch.zeros(count, slots, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            self.tokens[row, longest - len(prompt) : longest] = torch.tensor(prompt, device=device)
        shape = (config.num_key_value_heads, slots, config.head_dim)
        self.cache = torch.zeros(
            config.num_hidden_layers, 2, count, *shape, dtype=target.dtype, device=device
        )
        self.states = torch.empty(
            *(count, slots, len(target.aux_layers), config.hidden_size),
            dtype=torch.bfloat16 if target.dtype == torch.bfloat16 else torch.float32,
            device=device,
        )

    def prefill(self, prompts: list[list[int]]) -> torch.Tensor:
        """Computes the prompts; returns the logits that follow each."""
        longest = self.longest
        slot = torch.arange(longest, device=self.target.device)
        causal = slot[:, None] >= slot
        logits = []
        for first in range(0, len(prompts), PREFILL_ROWS):
            rows = slice(first, first + PREFILL_ROWS)
            visible = slot >= self.padding[rows, None]
            # A padding slot sees itself, since a softmax over nothing is NaN.
            mask = (causal & visible[:, None]) | torch.eye(
                longest, dtype=torch.bool, device=self.target.device
            )
            logits.append(
                self.target.forward(
                    self.tokens[rows, :longest],
                    (slot - self.padding[rows, None]).clamp(min=0),
                    mask[:, None],
                    self.cache[:, :, rows],
                    0,
                    self.states[rows, :longest],
                )
            )
        return torch.cat(logits)

    def step(self, slot: int) -> torch.Tensor:
        """Computes the token at `slot` of each row; returns the logits that follow."""
        slots = torch.arange(slot + 1, device=self.target.device)
        return self.target.forward(
            self.tokens[:, slot : slot + 1],
            (slot - self.padding)[:, None],
            (slots >= self.padding[:, None])[:, None, None],
            self.cache,
            slot,
            self.states[:, slot : slot + 1],
        )

    def finish(self, ended: torch.Tensor, slot: int) -> Iterator[Sequence]:
        """Yields the rows that end with the token at `slot`."""
        for row in torch.nonzero(ended & self.live).flatten().tolist():
            first = int(self.padding[row])
            yield Sequence(
                int(self.rows[row]),
                self.tokens[row, first : slot + 1].cpu(),
                self.longest - first,
                self.states[row, first:slot].cpu().clone(),
            )
        self.live = self.live & ~ended

    def compact(self) -> None:
        """Drops finished rows once they are many enough to pay for the copy."""
        if self.live.float().mean() >= COMPACT_BELOW:
            return
        keep = torch.nonzero(self.live).flatten()
        self.cache = self.cache.index_select(2, keep)
        self.rows, self.padding = self.rows[keep], self.padding[keep]
        self.tokens, self.states = self.tokens[keep], self.states[keep]
        self.live = self.live[keep]
