"""Starts a head from a linear guess, fitted in closed form: training does not begin at zero.

With y_t the target's last hidden state at token t, normed, and e_t the normed embedding of token t,
least squares give C and B of

    y_{t+1} ~ C y_t + B e_{t+1}

and the head's layer can hold just that: fc passes y_t on, most heads look at their own token alone,
and their values and output project [B, C - 1] (its best approximation of their rank). What comes
out is y-like again, so that the guess holds for further steps.
"""

import torch
from torch.nn import functional

from benchmarks.draft.head import Eagle3Head
from benchmarks.draft.target import Target
from benchmarks.draft.train import Batch

# Heads that start with a look at other tokens.
FREE_HEADS = 2
# Score of a token with itself, where others are near 0: e^8 outweighs some hundred others.
SELF_SCORE = 8.0
RIDGE = 1e-3


@torch.no_grad()
def start_linear(head: Eagle3Head, target: Target, batches: list[Batch]) -> None:
    """Sets a new head's weights to the linear guess, fitted on batches."""
    size, width = head.config.hidden_size, head.config.head_dim
    eye = torch.eye(2 * size, device=target.device)
    gram, moment = 0 * eye, 0 * eye[:, :size]
    for batch in batches:
        tokens, answered = (part.to(target.device) for part in batch)
        normed = functional.rms_norm(target.states(tokens)[:, :, -1], (size,))
        embedded = functional.rms_norm(target.embedding[tokens], (size,))
        inputs = torch.cat([embedded[:, 1:], normed[:, :-1]], -1)[answered[:, 1:]]
        gram += inputs.T @ inputs
        moment += inputs.T @ normed[:, 1:][answered[:, 1:]]
    # [B, C - 1]: inputs of the attention are the embedding, then the hidden state.
    wanted = torch.linalg.solve(gram + RIDGE * gram.diagonal().mean() * eye, moment).T
    wanted[:, size:] -= eye[:size, :size]
    layer = head.layers[0]
    for norm in (*head.fc_norm, layer.input_layernorm, layer.hidden_norm):
        norm.weight.fill_(1.0)
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -size:] = eye[:size, :size]
    layer.mlp.down_proj.weight.zero_()
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
