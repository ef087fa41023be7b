from typing import NamedTuple

import torch


class Clipped(NamedTuple):
    logits: torch.Tensor
    losses: torch.Tensor
    gained: torch.Tensor
    target_lse: torch.Tensor


def clip_rows(*a, **k):
    raise NotImplementedError
