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
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from benchmarks.draft.target import Target


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
        layer: Any = LlamaDecoderLayer(config, 0)
        layer.hidden_norm = nn.RMSNorm(size, eps)
        # The attention takes in a token and a hidden state.
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, nn.Linear(2 * size, width, bias=False))
        self.layers: Any = nn.ModuleList([layer])
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, len(draft_tokens), bias=False)
        self.register_buffer("draft_tokens", draft_tokens, persistent=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def steps(
        self, states: torch.Tensor, embeddings: torch.Tensor, count: int
    ) -> Iterator[torch.Tensor]:
        """Runs the drafting steps from each token at once, fed with the true tokens.

        Args:
            states: [batch, length, aux, hidden], the target's at each token.
            embeddings: [batch, length + count, hidden]; [:, t] embeds the token after t.
            count: how many steps.

        Yields:
            Each step's normed output, [batch, length, hidden]: what lm_head takes in.
        """
        layer, length = self.layers[0], states.shape[1]
        attention = layer.self_attn
        parts = [norm(states[..., index, :]) for index, norm in enumerate(self.fc_norm)]
        hidden: torch.Tensor = self.fc(torch.cat(parts, -1)).float()
        keys, values = [], []
        for step in range(count):
            residual = layer.hidden_norm(hidden)
            embedded = layer.input_layernorm(embeddings[:, step : step + length])
            inputs = torch.cat([embedded, residual], -1)
            query, key, value = (
                part(inputs).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2).float()
                for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            places = torch.arange(step, step + length, device=states.device)[None]
            query, key = apply_rotary_pos_emb(query, key, *self.rotary(hidden, places))
            keys.append(key)
            values.append(value)
            attended = attend(query, keys, values).transpose(1, 2).flatten(2)
            hidden = residual + attention.o_proj(attended).float()
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden)).float()
            yield self.norm(hidden)


def attend(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> torch.Tensor:
    """Attention of one drafting step from all anchors.

    All are [batch, heads, length, head_dim]. The keys and values of step 0 are for all anchors from
    theirs on, those of each later step for their anchor alone, which is one score.
    """
    length, width = query.shape[-2:]
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = [(query @ keys[0].mT).masked_fill(later, -torch.inf)]
    scores += [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
    weights = (torch.cat(scores, -1) / width**0.5).softmax(-1)
    attended: torch.Tensor = weights[..., :length] @ values[0]
    for index, value in enumerate(values[1:], length):
        attended = attended + weights[..., index, None] * value
    return attended


def new_head(target: Target, draft_tokens: torch.Tensor, seed: int = 0) -> Eagle3Head:
    """Makes a head before `start_linear`, with the target's own weights where shapes allow.

    It has as many key-value heads as attention heads: the token just chosen comes in through the
    values alone, so that narrow ones would be its bottleneck.
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
        head.lm_head.weight.copy_(target.lm_head[draft_tokens.to(target.device)])
        head.norm.weight.copy_(target.final_norm)
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        layer.mlp.load_state_dict(last.mlp.state_dict())
    return head.to(target.device)
