"""A tiny target and the data that its answers give, for the tests of a draft's making."""

import pytest
import torch

import tiny_models
from benchmarks.draft.data import make_shard
from benchmarks.draft.target import Target
from tiny_draft import AUX, DATA, decode, encode


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    made = tiny_models.llama(directory)
    with torch.no_grad():
        # So near a function of the last token that least squares guess it.
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)
    made.save_pretrained(directory)
    tiny_models.tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def target(model):
    return Target(model, AUX, dtype=torch.float32)


@pytest.fixture(scope="session")
def shards(target, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    for number in range(DATA.shards):
        assert make_shard(directory, number, DATA, target, encode, decode)
    return directory
