#!/usr/bin/env bash
# transformers' all_special_ids lacks special tokens that skip_special_tokens drops.
#
# Seen with: transformers 5.19.0, gguf 0.19.0.
# One would guess: all_special_ids names all special tokens. Of a tokenizer that is read from a GGUF file
# it names those with a role (beginning, end, unknown, padding). The file's other control tokens, such as
# the markers of a chat template, are special in added_tokens_decoder, and decode leaves them out, but
# all_special_ids has none of them. To find all, read added_tokens_decoder.
# Output:
#   control tokens of the file: ['<s>', '</s>', '<|user|>']
#   all_special_tokens: ['<s>', '</s>']
#   special in added_tokens_decoder: ['<s>', '</s>', '<|user|>']
#   <|user|>ab decoded with skip_special_tokens: 'ab'
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" transformers==5.19.0 gguf==0.19.0 torch==2.13.0

python -W ignore - << 'EOF'
import gguf
import transformers

tokens = ["<s>", "</s>", "<|user|>", "a", "b", "ab"]
control = tokens[:3]
normal = gguf.TokenType.NORMAL
writer = gguf.GGUFWriter("model.gguf", "llama")
writer.add_context_length(64)
writer.add_embedding_length(8)
writer.add_block_count(1)
writer.add_head_count(1)
writer.add_feed_forward_length(8)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_vocab_size(len(tokens))
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("smollm")
writer.add_token_list(tokens)
writer.add_token_types([gguf.TokenType.CONTROL if it in control else normal for it in tokens])
writer.add_token_merges(["a b"])
writer.add_bos_token_id(0)
writer.add_eos_token_id(1)
writer.add_unk_token_id(1)
writer.add_pad_token_id(1)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()

tokenizer = transformers.AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
named = tokenizer.all_special_tokens
special = [it.content for it in tokenizer.added_tokens_decoder.values() if it.special]
special = [it for it in tokens if it in special]
decoded = tokenizer.decode([2, 5], skip_special_tokens=True)
print("control tokens of the file:", control)
print("all_special_tokens:", named)
print("special in added_tokens_decoder:", special)
print("<|user|>ab decoded with skip_special_tokens:", repr(decoded))
assert set(named) == {"<s>", "</s>"} and special == control and decoded == "ab", "changed"
EOF
