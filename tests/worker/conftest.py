"""Fixtures for tests of real engines."""

import pytest

import tiny_models


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directory of a target, directory of a draft that is its first layer, and the target."""
    directory, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    target = tiny_models.llama(directory)
    tiny_models.first_layer(draft, target)
    return directory, draft, target
