"""Distributions of drafts, by the definitions of the sampling parameters."""

import numpy as np
import torch

VOCAB = 40


def logits_of(rows, generator):
    """Returns random rows that bfloat16 represents, without ties for top-k."""
    order = [torch.randperm(VOCAB, generator=generator) for _ in range(rows)]
    return torch.stack(order) / 8 - 2.5


def distribution(logits, temperature, tokens, parameters, dtype=torch.float32):
    """Applies a request's parameters, as in `ASKED`, to a row in double precision.

    `tokens` are those of the prompt and of the output, and `dtype` is that of penalized logits.
    """
    repetition, frequency, presence, k, p = parameters
    logits = np.array(logits, dtype=float)
    in_prompt, counts = (np.bincount(ids, minlength=len(logits)) for ids in tokens)
    seen = (in_prompt > 0) | (counts > 0)
    logits *= np.where(seen, np.where(logits > 0, 1 / repetition, repetition), 1)
    logits -= frequency * counts + presence * (counts > 0)
    logits = torch.tensor(logits).to(dtype).double().numpy()
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights)
    weights[order[k if k < VOCAB else len(logits) :]] = 0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= p]] = 0
    return weights / weights.sum()


# Prompt, output before the step, the step's tokens, and the parameters: repetition, frequency and
# presence penalty, top-k, top-p. The last request is greedy.
TEMPERATURES = [0.7, 1.0, 1.3, 0.9, 0.0]
ASKED = [
    ([1, 2, 3], [4, 4], [5, -1, -1], (1.3, 0.0, 0.0, VOCAB, 1.0)),
    ([1, 1, 7], [], [8, 9, -1], (1.0, 0.53, 0.7, 12, 1.0)),
    ([2, 5, 6], [9], [9, 9, 9], (1.0, 0.0, 0.0, VOCAB, 0.6)),
    ([2, 5, 6], [9], [3, -1, -1], (1.2, -0.4, 0.3, 6, 0.8)),
    ([2, 5, 6], [9], [3, -1, -1], (1.5, 0.0, 0.0, VOCAB, 1.0)),
]
