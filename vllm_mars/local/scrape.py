"""Names of vLLM's counters in `/metrics`."""

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
GENERATED_TOKENS = "vllm:generation_tokens_total"
