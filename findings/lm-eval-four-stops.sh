#!/usr/bin/env bash
# lm-eval sends a chat server the first four of a task's stop strings, and a completions server all.
#
# Seen with: lm-eval 0.4.13.
# One would guess: a task stops at all of its strings, or lm-eval says that it does not. For
# local-chat-completions it cuts the list, without a word, to the four that OpenAI's own API takes; vLLM
# takes any number. HumanEval has five, so a chat model's answers go on behind "\nprint". The token that
# ends a text comes last in the list, and is cut as well.
# Output:
#   the task: ['\nclass', '\ndef', '\n#', '\nif', '\nprint']
#   local-chat-completions: ['\nclass', '\ndef', '\n#', '\nif']
#   local-completions: ['\nclass', '\ndef', '\n#', '\nif', '\nprint', '</s>']
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" 'lm-eval[api]==0.4.13'

python - << 'EOF'
from pathlib import Path

import lm_eval
import yaml
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI


class Loader(yaml.SafeLoader):
    pass


Loader.add_constructor("!function", lambda *_: None)
task = Path(lm_eval.__file__).parent / "tasks/humaneval/humaneval.yaml"
until = yaml.load(task.read_text(), Loader)["generation_kwargs"]["until"]


def sent(model_class, prompt):
    model = model_class(base_url="http://localhost", model="m", tokenizer_backend=None)
    kwargs = {"until": list(until), "max_gen_toks": 1024}
    return model._create_payload(prompt, generate=True, gen_kwargs=kwargs, eos="</s>")["stop"]


chat = sent(LocalChatCompletion, [{"role": "user", "content": "def f():"}])
completions = sent(LocalCompletionsAPI, ["def f():"])
print("the task:", until)
print("local-chat-completions:", chat)
print("local-completions:", completions)
assert len(until) == 5 and chat == until[:4] and completions == [*until, "</s>"], "changed"
EOF
