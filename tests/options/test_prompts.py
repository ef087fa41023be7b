"""Start of a prompt's last message, with chat templates like those of several model families.

Tokenizers and templates are small and have the families' special tokens.
"""

import itertools
import re
import uuid
from pathlib import Path
from typing import NamedTuple

import mistral_common
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from engines import resolved
from vllm_mars.kernels.constraints.markers import THINKING, MarkerTracker


class Family(NamedTuple):
    """Chat template and special tokens of a model family.

    Attributes:
        ends: tokens that end a message.
        call: start marker, content and end marker of a tool call; the content has special tokens.
        others: tokens that are neither in `call` nor in `template`.
    """

    template: str
    ends: tuple[str, ...]
    call: tuple[str, str, str]
    others: tuple[str, ...] = ()


FAMILIES = {
    "Qwen": Family(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        ("<|im_end|>",),
        ("<tool_call>", '{"name": "f", <|fim_middle|>', "</tool_call>"),
        ("<|endoftext|>",),
    ),
    "Mistral": Family(
        "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must take turns') }}{% endif %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
        ("[/INST]", "</s>"),
        ("[TOOL_CALLS]", "f[CALL_ID]1[ARGS]{", "[/TOOL_CALLS]"),
    ),
    "DeepSeek": Family(
        "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'user' %}<｜User｜>"
        "{{ m.content }}{% else %}<｜Assistant｜></think>{{ m.content.split('</think>')[-1] }}"
        "<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>{% endif %}",
        ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "<｜tool▁calls▁end｜>"),
    ),
    "GLM": Family(
        "[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
        "{% else %}<|assistant|>\n<think></think>\n{{ m.content.strip() }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ("<|assistant|>", "<|user|>"),
        ("<tool_call>", "f\n<arg_key>a</arg_key>\n<arg_value>", "</tool_call>"),
        ("<|observation|>",),
    ),
}
CHAT = [
    {"role": "user", "content": "Call f"},
    {"role": "assistant", "content": "Why?"},
    {"role": "user", "content": "So"},
]


@pytest.fixture
def model(tmp_path):
    """A new path for each test, because vLLM caches tokenizers by path."""
    return tmp_path / uuid.uuid4().hex


def write(directory, template, *texts):
    """Writes a model's configuration and a byte tokenizer with the markers in the texts."""
    LlamaConfig(vocab_size=512, architectures=["LlamaForCausalLM"]).save_pretrained(directory)
    vocab = {byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}
    built = Tokenizer(BPE(vocab, []))
    built.pre_tokenizer, built.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=built)
    markers = re.findall(r"<[^<>{}%\s]+>|\[/?[A-Za-z_]{4,}\]", "".join((template or "", *texts)))
    fast.add_tokens(list(dict.fromkeys(["<think>", "</think>", *markers])), special_tokens=True)
    fast.chat_template = template
    fast.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def options_for(directory, span, arguments=(), **options):
    return resolved(directory, {"mars_strict_spans": [list(span)]}, arguments, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_message_ends_as_the_template_ends_it(name, model):
    """A section that was opened and not closed is open, for calls of any content and length."""
    template, ends, (start, call, end), others = FAMILIES[name]
    tokenizer = write(model, template, *ends, start, call, end, *others)
    thinking = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    config = options_for(model, (start, end), reasoning_config=thinking)
    assert set(config.turns) == {*tokenizer.convert_tokens_to_ids(list(ends))}
    tracker = MarkerTracker(config)

    def state_of(chat, answer=""):
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt + answer, add_special_tokens=False).input_ids
        return tracker.initial_state(ids) % (2 * THINKING)

    fresh = state_of(CHAT)
    assert fresh == THINKING * ("<think>" in template.rpartition("add_generation_prompt")[2])
    for gap, closed in itertools.product((0, 10, 300, 3_000), ("", f"{start} a {end}")):
        text = "</think>" + closed + start + call + "x" * gap
        assert state_of(CHAT, text) == 1
        assert state_of(CHAT, text + end) == 0
        assert state_of(CHAT, "<think>" + "x" * gap) == THINKING
    # Neither a user's text nor an earlier, truncated answer opens a section.
    typed = [*CHAT[:2], {"role": "user", "content": start + call}]
    cut = [CHAT[0], {"role": "assistant", "content": start + call}, CHAT[2]]
    assert state_of(typed) == state_of(cut) == fresh


QWEN = FAMILIES["Qwen"]
# (template, tokens that end its messages); None: unknown.
TEMPLATES = {
    "content in parts": (QWEN.template.replace("m.content", "m.content[0].text"), ["<|im_end|>"]),
    "one message only": (
        "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}" + QWEN.template,
        ["<|im_end|>"],
    ),
    "separated by text": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", []),
    "none": (None, []),
    "a bad one": ("{{ raise_exception('no chats here') }}", None),
    "one that hides texts": ("{% for m in messages %}<|im_end|>{% endfor %}", None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_unusual_templates(name, model, warnings):
    template, ends = TEMPLATES[name]
    tokenizer = write(model, template, "<|im_end|><|im_start|>", *QWEN.call)
    config = options_for(model, ("<tool_call>", "</tool_call>"))
    if ends is None:
        assert config.turns is None
        assert "by which tokens the chat template ends a message" in warnings[0]
        assert ("no chats here" in warnings[0]) == (name == "a bad one")
    else:
        assert list(config.turns) == tokenizer.convert_tokens_to_ids(ends)
        assert warnings == []


def test_the_servers_template_takes_precedence(tmp_path, model):
    path = tmp_path / "chat.jinja"
    path.write_text(QWEN.template.replace("<|im_end|>", "<|endoftext|>"))
    tokenizer = write(model, QWEN.template, "<|endoftext|>", *QWEN.call)
    span = "<tool_call>", "</tool_call>"
    for config in (
        options_for(model, span, {"chat_template": str(path)}),
        # An engine without a command line.
        options_for(model, span, additional_config={"mars_chat_template": path.read_text()}),
    ):
        assert list(config.turns) == tokenizer.convert_tokens_to_ids(["<|endoftext|>"])


def test_nothing_is_rendered_without_spans(model, warnings):
    write(model, "{{ raise_exception('no chats here') }}")
    assert resolved(model, {}).turns is None
    assert warnings == []


def test_without_a_tokenizer_the_ends_are_unknown(model, warnings):
    write(model, QWEN.template)
    config = options_for(model, (5, 6), skip_tokenizer_init=True)
    assert config.turns is None and "(there is no tokenizer)" in warnings[0]


def test_mistrals_tokenizers_need_no_template(model, warnings):
    from vllm.tokenizers.mistral import MistralTokenizer

    LlamaConfig(vocab_size=131_072, architectures=["LlamaForCausalLM"]).save_pretrained(model)
    data = Path(mistral_common.__file__).parent / "data"
    (model / "tekken.json").symlink_to(data / "tekken_240911.json")
    config = options_for(model, ("[TOOL_CALLS]", None), tokenizer_mode="mistral")
    vocab = MistralTokenizer.from_pretrained(str(model)).get_vocab()
    assert {*config.turns} == {vocab["[/INST]"], vocab["</s>"]}
    assert warnings == []
