"""What `mars_return` says and `mars_max_loss` promises, by a forward pass of the target."""

import torch

# What the forward pass of another implementation may differ by, in nats per token.
ROUNDING = 2e-4


def _logits(target, prompt, tokens):
    with torch.inference_mode():
        return target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]


def first_choices(target, prompt, tokens):
    """The target's, in the places of an answer's tokens."""
    return _logits(target, prompt, tokens).argmax(-1).tolist()


def log_probs(target, prompt, tokens):
    """The target's log-probabilities of an answer's tokens, and of its first choices there."""
    found = _logits(target, prompt, tokens).double().log_softmax(-1)
    return found.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist(), found.amax(-1).tolist()


def check_promise(target, prompt, tokens, returned, bound):
    """Whether each prefix of an answer keeps its bound, and what `mars_return` says is true.

    A sampled answer must be one of theta, where what is relaxed is served with certainty:
    m is 1, and each loss -log p.

    Returns:
        What the answer lost, in nats.
    """
    own, first = log_probs(target, prompt, tokens)
    if "log_ratios" in returned:
        assert len(returned["log_ratios"]) == len(tokens)
        told = {i: ratio for i, ratio in enumerate(returned["log_ratios"]) if ratio}
        first = [0.0] * len(tokens)
    else:
        told = dict(zip(returned["relaxed_positions"], returned["loss_nats"], strict=True))
    lost = 0.0
    for position in range(len(tokens)):
        if position in told:
            nats = first[position] - own[position]
            lost += nats
            assert abs(told[position] - nats) <= ROUNDING
        assert lost <= bound * (position + 101) + ROUNDING * (position + 1)
    return lost
