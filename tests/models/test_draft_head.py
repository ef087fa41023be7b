"""Heads that are refused before a server starts: damaged, truncated, for another target."""

import json

import pytest
from transformers import LlamaForCausalLM

import tiny_models
from vllm_mars.cli.__main__ import main
from vllm_mars.models.draft_head import PACKAGED_HEAD, TARGET_KEY, WEIGHTS_KEY, check_head, checksum


@pytest.fixture
def head(tiny_model, tmp_path):
    directory = tmp_path / "head"
    tiny_models.eagle(directory, LlamaForCausalLM.from_pretrained(tiny_model))
    path = directory / "config.json"
    made_for = {TARGET_KEY: {"sha256": checksum(tiny_model)}, WEIGHTS_KEY: checksum(directory)}
    path.write_text(json.dumps(json.loads(path.read_text()) | made_for))
    return directory


def change(path, end, flipped):
    """Truncates a file and flips bits of its last byte."""
    content = bytearray(path.read_bytes()[:end])
    if content:
        content[-1] ^= flipped
    path.write_bytes(content)


def test_a_head_that_fits(head, tiny_model, tmp_path):
    check_head(head, tiny_model)
    # A head without checksums is not checked.
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    check_head(tmp_path, tiny_model)


@pytest.mark.parametrize(("end", "flipped"), [(0, 0), (1000, 0), (-1, 0), (None, 4)])
def test_changed_weights(head, tiny_model, end, flipped):
    change(head / "model.safetensors", end, flipped)
    with pytest.raises(ValueError, match=r"is damaged: its model\.safetensors has .*json says"):
        check_head(head, tiny_model)


def test_another_target_of_the_same_sizes(head, tmp_path):
    other = tmp_path / "other"
    tiny_models.llama(other)
    change(other / "model.safetensors", None, 1)
    with pytest.raises(ValueError, match=r"draft=.*head was made for a target whose .* sha256"):
        check_head(head, other)


@pytest.mark.parametrize("which", ["head", "model"])
def test_missing_weights(head, tiny_model, tmp_path, which):
    if which == "head":
        (head / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors; give a directory that has"):
        check_head(head, tmp_path)


def test_the_head_of_this_checkout_fits_the_packaged_model(packaged_model):
    check_head(PACKAGED_HEAD, packaged_model)
    assert (PACKAGED_HEAD / "model.safetensors").stat().st_size < 23e6


@pytest.mark.parametrize("command", ["demo", "sweep"])
def test_a_damaged_head_is_refused_before_a_server_starts(
    head, tiny_model, tmp_path, command, capsys
):
    (head / "model.safetensors").write_bytes(b"cut")
    output = tmp_path / "sweep.jsonl"
    options = ["--model", str(tiny_model), "--draft", str(head), "--output", str(output)]
    assert main([command, *options]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert list(tmp_path.glob("sweep*")) == []
