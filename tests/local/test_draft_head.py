"""Heads that are refused before a server starts: damaged, cut, or made for another target."""

import json

import pytest
import torch
from safetensors.torch import load_file

import tiny_models
from benchmarks.draft.export import export
from benchmarks.draft.head import new_head
from benchmarks.draft.target import Target
from vllm_mars.cli import main
from vllm_mars.local.draft_head import (
    PACKAGED_HEAD,
    check_head,
    is_head,
    model_checksum,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    tiny_models.llama(directory)
    return directory


@pytest.fixture
def head(model, tmp_path):
    directory = tmp_path / "head"
    made = new_head(Target(model), torch.arange(0, 512, 2))
    export(made, directory, model, num_speculative_tokens=3)
    return directory


def change(path, update):
    content = json.loads(path.read_text())
    update(content)
    path.write_text(json.dumps(content))


def test_a_head_that_fits(head, model):
    check_head(head, model)
    assert load_file(head / "model.safetensors")["d2t"].tolist() == list(range(256))
    config = json.loads((head / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]


def test_the_checksum_of_a_model_that_was_made_here_comes_from_its_manifest(model, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no model\.safetensors; give the directory"):
        model_checksum(tmp_path / "nothing")
    assert model_checksum(tmp_path).startswith("e3b0c44298fc1c14")


def test_another_target_of_the_same_sizes(head, model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((model / "config.json").read_bytes())
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"draft=.*head was made for a target whose .* sha256"):
        check_head(head, other)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size"])
def test_a_target_of_another_size(head, model, tmp_path, name):
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, name: 96}))
    with pytest.raises(ValueError, match=rf"was made for a target with {name} \d+, and .* has 96"):
        check_head(head, other)


def test_a_target_that_is_no_directory(head):
    with pytest.raises(ValueError, match=r"cannot be compared with model=.*give the model's dir"):
        check_head(head, head / "nothing")


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_cut_weights(head, model, keep):
    weights = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").write_bytes(weights[:keep])
    with pytest.raises(ValueError, match=r"is damaged: its model\.safetensors of \d+ bytes has"):
        check_head(head, model)


def test_one_flipped_bit(head, model):
    weights = bytearray((head / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 4
    (head / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"is damaged: .* config\.json says"):
        check_head(head, model)


def test_missing_files(head, model):
    (head / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors that can be read"):
        check_head(head, model)
    (head / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json that can be read"):
        check_head(head, model)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"vllm_mars_target": 5}', '{"vllm_mars_target": {}}']
)
def test_a_broken_config(head, model, content):
    (head / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"is not an EAGLE-3 head of vllm-mars: config\.json"):
        check_head(head, model)


def test_values_of_wrong_types(head, model):
    change(head / "config.json", lambda c: c["vllm_mars_target"].update(vocab_size="512"))
    with pytest.raises(ValueError, match=r"values of wrong types under vllm_mars_target"):
        check_head(head, model)


def test_a_head_for_no_draft_tokens(head, model):
    def none(config):
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 0

    change(head / "config.json", none)
    with pytest.raises(ValueError, match=r"speculative_tokens=0 is below 1"):
        check_head(head, model)


def test_what_is_checked(head, tmp_path):
    assert is_head(head)
    assert not is_head(tmp_path / "no-such-directory")
    other = tmp_path / "draft-model"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "llama"}')
    assert not is_head(other)
    # Cut: it cannot be told, and vLLM would not tell it well.
    (other / "config.json").write_text('{"vllm_mars_')
    assert is_head(other)


def test_the_head_of_this_checkout_fits_the_packaged_model(packaged_model):
    check_head(PACKAGED_HEAD, packaged_model)
    assert (PACKAGED_HEAD / "model.safetensors").stat().st_size < 20e6


@pytest.mark.parametrize("command", ["demo", "sweep"])
def test_a_damaged_head_is_refused_before_a_server_starts(head, model, tmp_path, command, capsys):
    (head / "model.safetensors").write_bytes(b"cut")
    output = tmp_path / "found.jsonl"
    options = ["--model", str(model), "--draft", str(head), "--output", str(output)]
    assert main([command, *options]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert list(tmp_path.glob("found*")) == []
