"""What vLLM is told of a draft, by every command alike."""

import json

import pytest

from vllm_mars.local.drafts import draft_config, speculative_config


def test_names():
    assert draft_config("ngram") == {
        "method": "ngram",
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
    assert draft_config("suffix") == {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    assert draft_config("mtp") == {"method": "mtp"}
    assert draft_config("org/draft") == {"model": "org/draft"}


def test_vllm_is_told_that_a_directory_is_an_eagle3_head(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    draft = str(tmp_path)
    wanted = {"method": "eagle3", "model": draft, "num_speculative_tokens": 3}
    assert speculative_config(draft, 3) == wanted


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, {"method": "eagle3"}),
        ({"architectures": ["LlamaForCausalLM"]}, {}),
        ({"architectures": None}, {}),
    ],
)
def test_a_directory_of_a_draft(tmp_path, config, method):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert draft_config(str(tmp_path)) == {"model": str(tmp_path), **method}


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_directory_that_is_no_draft_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"has no config\.json that can be read .*or one of ngram, suffix, mtp"
    ):
        draft_config(str(tmp_path))
