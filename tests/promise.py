"""The promise of `mars_max_loss`, recomputed by a forward pass of the target."""

import torch

# What the forward pass of another implementation may differ by, in nats per token.
ROUNDING = 2e-4


def losses(target, prompt, tokens):
    """Nats that each token of an answer loses against the target's first choice at its place."""
    with torch.inference_mode():
        logits = target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]).tolist()


def check_promise(target, prompt, tokens, returned, bound, burst=1.0):
    """Whether each prefix of an answer keeps its bound, and what `mars_return` says is true.

    Returns:
        What the relaxed tokens of the answer lost, in nats.
    """
    each = losses(target, prompt, tokens)
    told = dict(zip(returned["relaxed_positions"], returned["loss_nats"], strict=True))
    lost = 0.0
    for position, nats in enumerate(each):
        if position in told:
            lost += nats
            assert abs(told[position] - nats) <= ROUNDING
        assert lost <= bound * (position + 1) + burst + ROUNDING * (position + 1)
    return lost
