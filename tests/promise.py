"""Checks of `mars_return` and `mars_max_loss` by a forward pass of the target."""

import torch

# Tolerance between implementations of the forward pass, in nats per token.
ROUNDING = 2e-4


def _logits(target, prompt, tokens):
    with torch.inference_mode():
        return target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]


def first_choices(target, prompt, tokens):
    """Returns the target's argmax at each token of an answer."""
    return _logits(target, prompt, tokens).argmax(-1).tolist()


def log_probs(target, prompt, tokens):
    """Returns the target's log-probabilities of an answer's tokens and of the argmax tokens."""
    log_p = _logits(target, prompt, tokens).double().log_softmax(-1)
    return log_p.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist(), log_p.amax(-1).tolist()


def check_promise(target, prompt, tokens, returned, bound):
    """Checks each prefix of an answer against its bound, and the report; returns the loss in nats.

    A sampled answer must be verified by theta, so a relaxed token has m = 1 and the loss -log p.
    """
    emitted, highest = log_probs(target, prompt, tokens)
    if "log_ratios" in returned:
        assert len(returned["log_ratios"]) == len(tokens)
        reported = {i: ratio for i, ratio in enumerate(returned["log_ratios"]) if ratio}
        highest = [0.0] * len(tokens)
    else:
        reported = dict(zip(returned["relaxed_positions"], returned["loss_nats"], strict=True))
    lost = 0.0
    for position in range(len(tokens)):
        if position in reported:
            nats = highest[position] - emitted[position]
            lost += nats
            assert abs(reported[position] - nats) <= ROUNDING
        assert lost <= bound * (position + 101) + ROUNDING * (position + 1)
    return lost
