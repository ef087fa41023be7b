"""Markers of a real tokenizer and the options that need them."""

import pytest

from engines import MARS, engine_config, resolved
from vllm_mars.options import markers
from vllm_mars.options.config import config_of

# Single tokens of the packaged model.
START, END = "<jupyter_start>", "<jupyter_output>"


def ids_of(model, *tokens):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(list(tokens))


def test_text_becomes_ids(packaged_model):
    config = resolved(packaged_model, {"mars_strict_spans": [[START, END], [5, None]]})
    assert config.strict_spans == (tuple(ids_of(packaged_model, START, END)), (5, None))


def test_the_tool_parsers_markers_are_the_default(packaged_model, monkeypatch):
    from vllm.tool_parsers import ToolParserManager

    class Parser:
        tool_call_start_token, tool_call_end_token = START, END
        # The same marker again, without its end; sorted after the first.
        tool_calls_start_token = START
        tool_other_start_token = "<no such token>"
        tool_start_token = "<jupyter_code>"
        # Encloses the answer itself.
        response_start_token = "<reponame>"

        def __init__(self, tokenizer):
            pass

    monkeypatch.setattr(ToolParserManager, "get_tool_parser", lambda name: Parser)
    config = resolved(packaged_model, {}, {"tool_call_parser": "any"})
    start, end, code = ids_of(packaged_model, START, END, "<jupyter_code>")
    assert set(config.strict_spans) == {(start, end), (code, None)}
    off = resolved(packaged_model, {"mars_strict_spans": []}, {"tool_call_parser": "any"})
    assert off.strict_spans == ()


def test_the_tool_parser_of_an_engine_without_a_command_line(packaged_model, monkeypatch):
    """Ray Serve creates engines without a command line."""
    monkeypatch.setattr(markers, "_spans_of_tool_parser", lambda name, _: ((len(name), None),))
    parser = {"mars_tool_call_parser": "hermes"}
    config = config_of(engine_config(packaged_model, MARS, additional_config=parser))
    assert config.strict_spans == ((6, None),)


def test_a_tool_parser_without_markers_is_warned_of(packaged_model, warnings):
    assert resolved(packaged_model, {}, {"tool_call_parser": "pythonic"}).strict_spans == ()
    assert (
        "the markers of the tool parser pythonic are not known; mars_strict_spans can"
        in warnings[0]
    )


def test_the_thinking_section_is_vllms(packaged_model, warnings):
    from vllm.config.reasoning import ReasoningConfig

    def section(*markers, **options):
        both = dict(zip(("reasoning_start_str", "reasoning_end_str"), markers, strict=True))
        config = resolved(packaged_model, options, reasoning_config=ReasoningConfig(**both))
        return config.thinking_start, config.thinking_end

    ids = tuple(ids_of(packaged_model, START, END))
    assert section(START, END) == section(START, END, mars_scope="thinking") == ids
    assert not warnings
    # Without a single start token there is no section, but an opening still begins after the end.
    assert section("<think>", END) == section(END, END) == (None, ids[1])
    assert resolved(packaged_model, {}).thinking_end is None
    assert section("<think>", "</think>") == (None, None)
    assert "the end of the thinking section is 3 tokens of this model, not one" in warnings[0]


def test_every_option_for_the_thinking_section_is_read(packaged_model, monkeypatch):
    """With Qwen3's reasoning parser and the markers of its tokenizer."""
    from transformers import AutoTokenizer
    from vllm.config import StructuredOutputsConfig, reasoning

    start, end = "<think>", "</think>"
    tokenizer = AutoTokenizer.from_pretrained(packaged_model)
    tokenizer.add_tokens([start, end])
    monkeypatch.setattr(reasoning, "cached_tokenizer_from_config", lambda model_config: tokenizer)
    for options in (
        {"reasoning_parser": "qwen3"},
        {"structured_outputs_config": StructuredOutputsConfig(reasoning_parser="qwen3")},
        {"reasoning_config": {"reasoning_parser": "qwen3"}},
        {"reasoning_config": {"reasoning_start_str": start, "reasoning_end_str": end}},
    ):
        config = resolved(packaged_model, {"mars_scope": "answer"}, **options)
        section = [config.thinking_start, config.thinking_end]
        assert section == tokenizer.convert_tokens_to_ids([start, end]), options


@pytest.mark.parametrize("name", ["qwen3_xml", "kimi_k2", "gemma4", "hermes", "ernie45"])
def test_the_markers_of_vllms_tool_parsers_are_known(packaged_model, monkeypatch, name):
    """With a tokenizer that has a token for every marker."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(packaged_model)
    pairs = [
        ("<tool_call>", "</tool_call>"),
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        ("<|tool_call>", "<tool_call|>"),
    ]
    tokenizer.add_tokens([*sum(pairs, ()), "<think>", "</think>", "<response>", "</response>"])
    monkeypatch.setattr(markers, "_tokenizer", lambda model_config: tokenizer)
    expected = pairs[{"kimi_k2": 1, "gemma4": 2}.get(name, 0)]
    spans = resolved(packaged_model, {}, {"tool_call_parser": name}).strict_spans
    assert spans == (tuple(tokenizer.convert_tokens_to_ids(expected)),)


@pytest.mark.parametrize(
    ("options", "engine_options", "message"),
    [
        ({"mars_strict_spans": [["<nothing>", None]]}, {}, "'<nothing>' is not one token of this"),
        ({"mars_strict_spans": [[10**6, None]]}, {}, r"1000000 is outside the model's vocabulary"),
        ({"mars_strict_spans": [[3, 4], [3, 5]]}, {}, "token 3 starts two spans; name it once"),
        (
            {"mars_strict_spans": [[n, None] for n in range(32)]},
            {},
            "has 32 spans, but the limit is 31",
        ),
        ({"mars_strict_spans": "<a>"}, {}, "mars_strict_spans='<a>' is not a list of pairs"),
        ({"mars_strict_spans": [[1]]}, {}, "is not a list of pairs of a start and an end token"),
        (
            {"mars_scope": "answer"},
            {},
            "mars_scope='answer' needs the markers of the thinking section, each one token of this "
            "model, but this server does not know them; name --reasoning-parser or --reasoning-",
        ),
        ({"mars_max_loss": -0.5}, {}, r"mars_max_loss=-0.5 is outside \[0, 1024\]"),
        ({"mars_max_loss": "x"}, {}, "mars_max_loss='x' is a str"),
    ],
)
def test_bad_options_are_named(packaged_model, options, engine_options, message):
    with pytest.raises(ValueError, match=message):
        resolved(packaged_model, options, **engine_options)


def test_batch_sharded_sampling_is_refused(packaged_model):
    message = "cannot serve enable_batch_sharded_sampling: each rank verifies requests of its own"
    with pytest.raises(NotImplementedError, match=message):
        resolved(packaged_model, {}, enable_batch_sharded_sampling=True)
