"""The EAGLE-3 head in torch: one decoder layer over the target's hidden states.

With h_t the target's states at token t, x the tokens, N an RMS norm: a step drafts from anchor t

    f_0 = fc(cat(N_0(a_0), N_1(a_1), ...))           a_i: the kept hidden states of h_t
    e_j = N_e(embedding(x_{t+1+j})),  r_j = N_h(f_j)
    o_j = r_j + attention(cat(e_j, r_j));  o_j += mlp(N_m(o_j))
    f_{j+1} = o_j;  logits_j = lm_head(N(o_j))       which guess x_{t+2+j}

At step j the query is at position t + j. It sees the keys of step 0 at anchors up to t, and its own
of the steps 1..j: what vLLM's cache holds while it drafts. These are the options `fc_norm` and
`norm_before_residual` of vLLM's `Eagle3LlamaForCausalLM`, and the names of the
tensors are those that it and the speculators library read.

Paper: EAGLE-3, arXiv 2503.01840 (training-time test, section 3.2).
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    rotate_half,
)

from benchmarks.draft.target import Target

# Of each step so far: keys, values, and which of them each query sees.
Seen = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Layer(LlamaDecoderLayer):  # type: ignore[misc]
    """The parts of the one decoder layer, whose attention takes in a token and a hidden state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        size = config.hidden_size
        self.hidden_norm = nn.RMSNorm(size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * size, width, bias=False))


class Eagle3Head(nn.Module):
    """The head, without the embedding, which is the target's.

    Args:
        config: the sizes of its layer, which are the target's where the two meet, and `aux_layers`.
        draft_tokens: [draft_vocab_size] int64, ascending: the target's id of each draft token.
    """

    draft_tokens: torch.Tensor

    def __init__(self, config: LlamaConfig, draft_tokens: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc_norm = nn.ModuleList(nn.RMSNorm(size, eps) for _ in config.aux_layers)
        self.fc = nn.Linear(len(config.aux_layers) * size, size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, len(draft_tokens), bias=False)
        self.register_buffer("draft_tokens", draft_tokens, persistent=False)
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    def layer(self) -> Layer:
        """The one decoder layer."""
        return cast(Layer, self.layers[0])

    @property
    def state_norms(self) -> list[nn.RMSNorm]:
        """The norms of the hidden states that come in."""
        return [cast(nn.RMSNorm, norm) for norm in self.fc_norm]

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Returns f_0 of hidden states [..., aux, hidden]."""
        parts = [norm(states[..., index, :].float()) for index, norm in enumerate(self.state_norms)]
        combined: torch.Tensor = self.fc(torch.cat(parts, -1))
        return combined

    def steps(
        self,
        states: torch.Tensor,
        embeddings: torch.Tensor,
        anchors: torch.Tensor,
        count: int,
    ) -> Iterator[torch.Tensor]:
        """Runs the drafting steps from many anchors at once, fed with the true tokens.

        Args:
            states: [batch, length, aux, hidden], the target's at each token.
            embeddings: [batch, length + count, hidden]; [:, t] embeds the token after t.
            anchors: [batch, queries] int64, places in `length` to draft from.
            count: how many steps.

        Yields:
            Each step's normed output, [batch, queries, hidden]: what lm_head takes in.
        """
        combined = self.combine(states)
        places = torch.arange(states.shape[1], device=states.device)
        # Keys of step 0 are there for each token, whether it is an anchor or not.
        inputs, _ = self._inputs(embeddings[:, : states.shape[1]], combined)
        seen = [(*self._keys_values(inputs, places), places <= anchors[:, None, :, None])]
        hidden = _pick(combined, anchors)
        for step in range(count):
            at = anchors + step
            hidden = self._step(_pick(embeddings, at), hidden, at, seen, own=step > 0)
            yield self.norm(hidden)

    def _step(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        seen: Seen,
        *,
        own: bool,
    ) -> torch.Tensor:
        """One drafting step, from f_j to f_{j+1} of each query, `[batch, queries, hidden]`.

        Args:
            embeddings, hidden: `[batch, queries, hidden]`, e_j and f_j.
            positions: `[batch, queries]`.
            seen: the keys of step 0, then those of later steps, of which each query sees its own.
            own: whether this is a later step, whose keys and values join `seen`.
        """
        layer, (rows, queries) = self.layer, positions.shape
        inputs, residual = self._inputs(embeddings, hidden)
        if own:
            itself = torch.eye(queries, dtype=torch.bool, device=positions.device)
            seen.append((*self._keys_values(inputs, positions), itself))
        keys, values, masks = zip(*seen, strict=True)
        attended = functional.scaled_dot_product_attention(
            self._heads(layer.self_attn.q_proj(inputs), positions),
            torch.cat(keys, 2),
            torch.cat(values, 2),
            torch.cat([mask.expand(rows, 1, queries, -1) for mask in masks], -1),
            enable_gqa=True,
        )
        added: torch.Tensor = layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2)).float()
        residual = residual + added
        changed: torch.Tensor = layer.mlp(layer.post_attention_layernorm(residual)).float()
        return residual + changed

    def _keys_values(
        self, inputs: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attention = self.layer.self_attn
        return self._heads(attention.k_proj(inputs), positions), self._heads(
            attention.v_proj(inputs)
        )

    def _inputs(
        self, embeddings: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layer
        residual = layer.hidden_norm(hidden.float())
        return torch.cat([layer.input_layernorm(embeddings.float()), residual], -1), residual

    def _heads(
        self, projected: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Splits into [batch, heads, length, head_dim], rotated where positions are given."""
        shape = (*projected.shape[:-1], -1, self.config.head_dim)
        split = projected.view(shape).transpose(1, 2).float()
        if positions is None:
            return split
        cos, sin = (part.unsqueeze(-3) for part in self.rotary(split, positions))
        rotated: torch.Tensor = split * cos + rotate_half(split) * sin
        return rotated


def new_head(
    target: Target,
    draft_tokens: torch.Tensor,
    *,
    intermediate_size: int | None = None,
    num_key_value_heads: int | None = None,
    aux_layers: tuple[int, ...] | None = None,
    seed: int = 0,
) -> Eagle3Head:
    """Makes an untrained head that starts from the target's own weights where shapes allow.

    Args:
        target: the target.
        draft_tokens: [draft_vocab_size] int64, ascending.
        intermediate_size: width of the MLP; the target's by default.
        num_key_value_heads: as many as attention heads by default: the token just chosen comes in
            through the values alone, so that narrow ones would be its bottleneck.
        aux_layers: the hidden states it is fed; the target's by default.
        seed: of the random weights.
    """
    given = target.config
    config = LlamaConfig.from_dict(
        {
            **given.to_dict(),
            "intermediate_size": intermediate_size or given.intermediate_size,
            "num_key_value_heads": num_key_value_heads or given.num_attention_heads,
            "aux_layers": aux_layers or target.aux_layers,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config, draft_tokens.cpu())
        for name, parameter in head.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=given.initializer_range)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
    last = target.layers[-1]
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head[draft_tokens].float())
        head.norm.weight.copy_(target.final_norm)
        layer = head.layer
        layer.input_layernorm.weight.copy_(target.layers[0].input_layernorm.weight)
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        if config.intermediate_size == given.intermediate_size:
            layer.mlp.load_state_dict(last.mlp.state_dict())
        # The residual starts as what the target's own lm_head takes in.
        if config.aux_layers[-1] == given.num_hidden_layers:
            head.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
    return head.to(target.device)


def _pick(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns values[b, places[b, q]] as [batch, queries, hidden]."""
    return values.gather(1, places[..., None].expand(-1, -1, values.shape[-1]))
