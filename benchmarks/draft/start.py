"""Starts a head from a linear guess, fitted in closed form: training does not begin at zero.

With y_t the target's last hidden state at token t, normed, and e_t the normed embedding of token t,
least squares give C and B of

    y_{t+1} ~ C y_t + B e_{t+1}

and the head's layer can hold just that: fc passes y_t on, most heads look at their own token alone,
and their values and output project [C - 1, B] (its best approximation of their rank). What comes
out is y-like again, so that the guess holds for further steps.
"""

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
def start_linear(head: Eagle3Head, target: Target, shard: Shard) -> None:
    """Sets a new head's weights to the linear guess, fitted on a shard."""
    size, width = head.config.hidden_size, head.config.head_dim
    hidden_part, embedding_part = _fit(target, shard)
    layer = head.layers[0]
    for norm in (*head.fc_norm, layer.input_layernorm, layer.hidden_norm):
        norm.weight.fill_(1.0)
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -size:] = torch.eye(size)
    layer.mlp.down_proj.weight.zero_()
    # Inputs of the attention: the embedding, then the hidden state.
    wanted = torch.cat([embedding_part, hidden_part - torch.eye(size)], 1)
    own = max(1, head.config.num_attention_heads - FREE_HEADS)
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


def _fit(target: Target, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns C and B."""
    size = target.config.hidden_size
    gram, moment = torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, size)
    for tokens, states in zip(shard.tokens, shard.states, strict=True):
        normed = functional.rms_norm(states[:-1, -1].float(), (size,))
        embedded = functional.rms_norm(target.embedding[tokens[1:-1]], (size,))
        inputs = torch.cat([normed[:-1], embedded], 1)
        gram += inputs.T @ inputs
        moment += inputs.T @ normed[1:]
    gram += RIDGE * gram.diagonal().mean() * torch.eye(2 * size)
    solution = torch.linalg.solve(gram, moment).T
    return solution[:, :size], solution[:, size:]
