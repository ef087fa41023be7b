"""What the tests of a draft's making share: a few conversations of a tiny target."""

import torch

from benchmarks.draft.data import DataOptions

AUX = (0, 1, 2)
DATA = DataOptions(
    shards=3,
    shard_prompts=12,
    batch=5,
    max_prompt_tokens=24,
    max_tokens=12,
    aux_layers=AUX,
)


def encode(messages):
    return [3 + byte for byte in messages[-1]["content"].encode()][:24]


def decode(tokens):
    return " ".join(f"Word{token}." for token in tokens.tolist())


def greedy(target, given, max_tokens):
    """Each prompt's sequence, in the order of the prompts."""
    generator = torch.Generator()
    found = target.answer(given, [0.0] * len(given), max_tokens, generator)
    return sorted(found, key=lambda sequence: sequence.index)
