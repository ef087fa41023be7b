"""The mended CPU kernels, and proof that vLLM's own still need the mend."""

import subprocess
import sys

import pytest
import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

pytestmark = [
    pytest.mark.skipif(HAS_TRITON, reason="vLLM runs its Triton kernels here; see the CPU build"),
    pytest.mark.usefixtures("mended_kernels"),
]

# In a process of its own, because a mend lasts as long as its process. The poisoned memory makes
# what an uninitialised output holds certain.
_PROBE = """
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens
current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()
poison = torch.Tensor.new_empty
torch.Tensor.new_empty = lambda self, *size, **options: poison(self, *size, **options).fill_(7)
print(expand_batch_to_tokens(torch.tensor([0.5, 0.25]), torch.tensor([1, 3]), 3).tolist())
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expand(dtype):
    values = torch.tensor([3, 0, 5], dtype=dtype)
    cu_num_tokens = torch.tensor([2, 2, 5], dtype=torch.int32)
    expanded = expand_batch_to_tokens(values, cu_num_tokens, 5)
    assert expanded.dtype == dtype
    assert expanded.tolist() == [3, 3, 5, 5, 5]
    values[0] = 0
    expanded = expand_batch_to_tokens(values, cu_num_tokens, 5, replace_from=0, replace_to=1)
    assert expanded.tolist() == [1, 1, 5, 5, 5]


@pytest.mark.nightly
def test_vllms_own_expand_still_needs_the_mend():
    """When this fails with [0.5, 0.25, 0.25], vLLM has mended its kernel and ours can go."""
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=300, check=True
    )
    assert probe.stdout.splitlines()[-1] == "[7.0, 7.0, 7.0]"
