"""`verify_tree` on a real GPU: its Triton form equals the torch form."""

import pytest
import torch

from tree_calls import random_call
from vllm_mars import verify_tree

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)


@pytest.mark.parametrize("vocab", [None, 111, 128_256])
def test_equals_the_torch_form(vocab):
    for seed in range(30):
        call = random_call(seed, vocab and [60, 0, 128, 7], vocab)
        call = {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in call.items()}
        found, wanted = (verify_tree(**call, backend=name) for name in ("triton", "torch"))
        assert all(map(torch.equal, found, wanted)), seed
