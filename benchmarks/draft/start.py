"""Starts a head from a linear guess, fitted in closed form: training does not begin at zero.

With y_t the target's last hidden state at token t, normed, and e_t the normed embedding of token t,
least squares give C and B of

    y_{t+1} ~ C y_t + B e_{t+1}

and the head's layer can hold just that: fc passes y_t on, most heads look at their own token alone,
and their values and output project [C - 1, B] (its best approximation of their rank). What comes
out is y-like again, so that the guess holds for further steps. Training then adds what is not
linear: the MLP, the other hidden states, other tokens. The solution takes a few seconds; training
takes dozens of steps to get as far.
"""

from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.draft.data import Shard
from benchmarks.draft.head import Eagle3Head
from benchmarks.draft.target import Target

# Heads that start with a look at other tokens.
FREE_HEADS = 2
# Score of a token with itself, where others are near 0: e^8 outweighs some hundred others.
SELF_SCORE = 8.0
RIDGE = 1e-3


@torch.no_grad()
def start_linear(head: Eagle3Head, target: Target, paths: list[Path]) -> None:
    """Sets the head's weights to the linear guess.

    Args:
        head: a new head, whose last hidden state is what the target's final norm takes in, with as
            many key-value heads as attention heads.
        target: the target.
        paths: shards to fit on.

    Raises:
        ValueError: the head has another shape.
    """
    config = head.config
    if config.aux_layers[-1] != target.config.num_hidden_layers:
        raise ValueError(
            f"aux_layers={config.aux_layers} does not end with the target's last state, "
            f"{target.config.num_hidden_layers}; add it."
        )
    if config.num_key_value_heads != config.num_attention_heads:
        raise ValueError(
            f"num_key_value_heads={config.num_key_value_heads} is not num_attention_heads="
            f"{config.num_attention_heads}; a linear start needs a value for each head."
        )
    size, width = config.hidden_size, config.head_dim
    hidden_part, embedding_part = _fit(target, paths)
    layer = head.layer
    for norm in (*head.state_norms, layer.input_layernorm, layer.hidden_norm):
        norm.weight.fill_(1.0)
    head.norm.weight.copy_(target.final_norm)
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -size:] = torch.eye(size)
    layer.mlp.down_proj.weight.zero_()
    # Inputs of the attention: the embedding, then the hidden state.
    wanted = torch.cat([embedding_part, hidden_part - torch.eye(size)], 1)
    own = max(1, config.num_attention_heads - FREE_HEADS)
    rank = min(own * width, size)
    left, scale, right = torch.linalg.svd(wanted, full_matrices=False)
    root = scale[:rank].sqrt()
    attention = layer.self_attn
    attention.o_proj.weight.zero_()
    attention.o_proj.weight[:, :rank] = left[:, :rank] * root
    attention.v_proj.weight[:rank] = root[:, None] * right[:rank]
    for index in range(own):
        rows = slice(index * width, (index + 1) * width)
        # Equal rows for query and key: a token's product with itself is a square, which the rotary
        # embedding leaves alone. A normed embedding projected on `width` orthonormal rows has a
        # squared length of about `width`, and scores are scaled by 1 / sqrt(width).
        square = torch.randn(size, width, generator=torch.Generator().manual_seed(index))
        same = torch.linalg.qr(square).Q.T * (SELF_SCORE / width**0.5) ** 0.5
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight[rows] = 0.0
            projection.weight[rows, :size] = same


def _fit(target: Target, paths: list[Path]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns C and B."""
    size = target.config.hidden_size
    last = target.aux_layers.index(target.config.num_hidden_layers)
    # Shards are read on the CPU.
    embedding = target.embedding.float().cpu()
    gram, moment = torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, size)
    for path in paths:
        for tokens, states in zip(*Shard(path).read(), strict=True):
            normed = functional.rms_norm(states[:-1, last].float(), (size,))
            embedded = functional.rms_norm(embedding[tokens[1:-1]], (size,))
            inputs = torch.cat([normed[:-1], embedded], 1)
            gram += inputs.T @ inputs
            moment += inputs.T @ normed[1:]
    gram += RIDGE * gram.diagonal().mean() * torch.eye(2 * size)
    solution = torch.linalg.solve(gram, moment).T
    return solution[:, :size], solution[:, size:]
