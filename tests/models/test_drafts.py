"""Speculative config of a draft, the same for every command."""

import json

import pytest

from vllm_mars.models.drafts import draft_config, speculative_config


@pytest.mark.parametrize(
    ("draft", "method"),
    [
        ("ngram", {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}),
        ("suffix", {"method": "suffix", "suffix_decoding_max_cached_requests": 0}),
        ("mtp", {"method": "mtp"}),
        ("org/draft", {"model": "org/draft"}),
        (["LlamaForCausalLMEagle3"], {"method": "eagle3"}),
        (["LlamaForCausalLM"], {}),
        (None, {}),
    ],
)
def test_speculative_config(tmp_path, draft, method):
    """`draft` is a name, or the architectures of a directory's config."""
    if not isinstance(draft, str):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": draft}))
        draft, method = str(tmp_path), {"model": str(tmp_path), **method}
    assert speculative_config(draft, 3, x=1) == {**method, "num_speculative_tokens": 3, "x": 1}


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_directory_without_a_config_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"has no config\.json that can be read .*or one of ngram, suffix, mtp"
    ):
        draft_config(str(tmp_path))
