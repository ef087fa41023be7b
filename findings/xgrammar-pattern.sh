#!/usr/bin/env bash
# xgrammar and llguidance, two of vLLM's backends, read the "pattern" of a JSON schema differently.
#
# Seen with: xgrammar 0.2.8, llguidance 1.7.6.
# One would guess: the pattern "b" holds for each string with a b in it, since JSON Schema's patterns are
# not anchored. It does in llguidance. In xgrammar it must match the whole string, so the only answer to
# {"type": "string", "pattern": "b"} is "b". vLLM's default, "auto", takes xgrammar wherever that supports
# a schema, so a keyword elsewhere in the schema decides what the pattern means.
# Output:
#   schema {"type": "string", "pattern": "b"}
#   "b":   xgrammar True, llguidance True
#   "abc": xgrammar False, llguidance True
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" xgrammar==0.2.8 llguidance==1.7.6 torch==2.13.0 numpy==2.3.5

python - << 'EOF'
import json

import llguidance
import xgrammar

schema = json.dumps({"type": "string", "pattern": "b"})
# A token for each character, and one that ends an answer.
characters = [chr(code) for code in range(128)]
end = len(characters)
compiler = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([*characters, "</s>"], vocab_size=end + 1, stop_token_ids=[end])
)


class Characters:
    eos_token_id, bos_token_id = end, None
    tokens = [character.encode() for character in characters] + [b"</s>"]
    special_token_ids = [end]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Characters()))
grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)

found = {}
print("schema", schema)
for text in ('"b"', '"abc"'):
    tokens = [*text.encode(), end]
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema))
    other = llguidance.LLMatcher(tokenizer, grammar)
    found[text] = (
        all(matcher.accept_token(token) for token in tokens),
        other.validate_tokens(tokens) == len(tokens),
    )
    print(f"{text + ':':6} xgrammar {found[text][0]}, llguidance {found[text][1]}")
assert found == {'"b"': (True, True), '"abc"': (False, True)}, "changed: what a pattern matches"
EOF
