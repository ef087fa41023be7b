"""The EAGLE-3 head in torch: one decoder layer over the target's hidden states.

With h_t the target's states at token t, x the tokens, N an RMS norm: a step drafts from anchor t

    f_0 = fc(cat(N_0(a_0), N_1(a_1), ...))           a_i: the kept hidden states of h_t
    e_j = N_e(embedding(x_{t+1+j})),  r_j = N_h(f_j)
    o_j = r_j + attention(cat(e_j, r_j));  o_j += mlp(N_m(o_j))
    f_{j+1} = o_j;  logits_j = lm_head(N(o_j))       which guess x_{t+2+j}

At step j the query is at position t + j. It sees the keys of step 0 at anchors up to t, and its own
of the steps 1..j: what vLLM's cache holds while it drafts. The options (`fc_norm`,
`norm_before_residual`) and names are those of vLLM's `Eagle3LlamaForCausalLM`.

Paper: EAGLE-3, arXiv 2503.01840 (training-time test, section 3.2).
"""

from collections.abc import Iterator
from typing import Any

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
        self.layers: Any = nn.ModuleList([Layer(config)])
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, len(draft_tokens), bias=False)
        self.register_buffer("draft_tokens", draft_tokens, persistent=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def steps(
        self, states: torch.Tensor, embeddings: torch.Tensor, anchors: torch.Tensor, count: int
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
        layer, (rows, queries) = self.layers[0], anchors.shape
        project = layer.self_attn
        parts = [norm(states[..., index, :].float()) for index, norm in enumerate(self.fc_norm)]
        combined: torch.Tensor = self.fc(torch.cat(parts, -1))
        places = torch.arange(states.shape[1])
        # Keys of step 0 are there for each token, whether it is an anchor or not.
        inputs, _ = self._inputs(embeddings[:, : states.shape[1]], combined)
        keys = [self._rotated(project.k_proj(inputs), places)]
        values = [self._heads(project.v_proj(inputs))]
        masks = [(places <= anchors[:, None, :, None]).expand(rows, 1, queries, -1)]
        itself = torch.eye(queries, dtype=torch.bool).expand(rows, 1, queries, -1)
        hidden = _pick(combined, anchors)
        for step in range(count):
            at = anchors + step
            inputs, residual = self._inputs(_pick(embeddings, at), hidden)
            if step:
                keys.append(self._rotated(project.k_proj(inputs), at))
                values.append(self._heads(project.v_proj(inputs)))
                masks.append(itself)
            attended = functional.scaled_dot_product_attention(
                self._rotated(project.q_proj(inputs), at),
                torch.cat(keys, 2),
                torch.cat(values, 2),
                torch.cat(masks, -1),
            )
            hidden = residual + project.o_proj(attended.transpose(1, 2).flatten(2)).float()
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden)).float()
            yield self.norm(hidden)

    def _inputs(
        self, embeddings: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what the attention takes in, and the residual."""
        residual = self.layers[0].hidden_norm(hidden.float())
        embedded = self.layers[0].input_layernorm(embeddings.float())
        return torch.cat([embedded, residual], -1), residual

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """Splits into [batch, heads, length, head_dim]."""
        shape = (*projected.shape[:-1], -1, self.config.head_dim)
        return projected.view(shape).transpose(1, 2).float()

    def _rotated(self, projected: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        split = self._heads(projected)
        cos, sin = (part.unsqueeze(-3) for part in self.rotary(split, positions))
        rotated: torch.Tensor = split * cos + rotate_half(split) * sin
        return rotated


def new_head(target: Target, draft_tokens: torch.Tensor, seed: int = 0) -> Eagle3Head:
    """Makes a head before `start_linear`, with the target's own weights where shapes allow.

    It has as many key-value heads as attention heads: the token just chosen comes in through the
    values alone, so that narrow ones would be its bottleneck.

    Args:
        target: the target.
        draft_tokens: [draft_vocab_size] int64, ascending.
        seed: of the random weights.
    """
    given = target.config
    own = {"num_key_value_heads": given.num_attention_heads, "aux_layers": target.aux_layers}
    config = LlamaConfig.from_dict({**given.to_dict(), **own})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config, draft_tokens)
        for parameter in head.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=given.initializer_range)
    last, layer = target.layers[-1], head.layers[0]
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head[draft_tokens].float())
        head.norm.weight.copy_(target.final_norm)
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        layer.mlp.load_state_dict(last.mlp.state_dict())
    return head


def _pick(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns values[b, places[b, q]] as [batch, queries, hidden]."""
    return values.gather(1, places[..., None].expand(-1, -1, values.shape[-1]))
