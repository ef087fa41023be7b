"""The tokens that keep their probability."""

from typing import NamedTuple

import torch

from vllm_mars.kernels.record import MOST_ENDS


class Protected(NamedTuple):
    """The tokens that keep their probability in every request.

    Attributes:
        mask: bool `[vocab]`, which they are.
        ids: int32 `[num_ids]`, the same as a list, behind them -1.
        num_ids: a multiple of MOST_ENDS, for tensors of few sizes.
    """

    mask: torch.Tensor
    ids: torch.Tensor
    num_ids: int

    @classmethod
    def of(cls, mask: torch.Tensor, device: torch.device) -> "Protected":
        """Those of a mask on the host, on a device."""
        found = mask.nonzero().flatten().int()
        size = -(-max(len(found), 1) // MOST_ENDS) * MOST_ENDS
        ids = torch.nn.functional.pad(found, (0, size - len(found)), value=-1)
        return cls(mask.to(device), ids.to(device), size)
