"""Options reach other processes unchanged, or start-up fails and names the node."""

import copy
import os
import pickle
import socket
import subprocess
import sys

import pytest

from vllm_mars import MarsConfig, __version__
from vllm_mars.hooks import pickled
from vllm_mars.hooks.pickled import PickledConfig

NODE = socket.gethostname()


def test_options_arrive_unchanged():
    options = PickledConfig(MarsConfig(protected_token_ids=(1, 2), strict_spans=((1, None),)))
    for arrived in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options)):
        assert type(arrived) is PickledConfig
        assert arrived.config == options.config


def test_another_version_is_refused_where_it_arrives(monkeypatch):
    monkeypatch.setattr(pickled, "__version__", "0.0.1")
    pickled_options = pickle.dumps(PickledConfig(MarsConfig()))
    monkeypatch.undo()
    with pytest.raises(RuntimeError) as refused:
        pickle.loads(pickled_options)
    assert str(refused.value) == (
        f"vllm-mars {__version__} is installed on the node {NODE}, but the server's options come "
        "from vllm-mars 0.0.1; install 0.0.1 there."
    )


def test_a_lock_on_one_node_is_refused_if_requests_may_relax(monkeypatch):
    """That rank would verify strictly and emit other tokens than the other ranks."""
    relaxable, strict = (
        pickle.dumps(PickledConfig(MarsConfig(max_loss=0, limit=limit))) for limit in (0.02, 0)
    )
    monkeypatch.setenv("VLLM_MARS_LOCK", "strict")
    message = f"VLLM_MARS_LOCK=strict is set on the node {NODE}, but not where .*; set it there as "
    with pytest.raises(RuntimeError, match=message):
        pickle.loads(relaxable)
    pickle.loads(strict)
    pickle.loads(pickle.dumps(PickledConfig(MarsConfig(max_loss=0, limit=0.02))))


def test_a_node_without_the_extension_cannot_read_options():
    pickled_options = pickle.dumps(PickledConfig(MarsConfig())).hex()
    # -I and -S hide all packages.
    program = f"import pickle; pickle.loads(bytes.fromhex('{pickled_options}'))"
    refused = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert refused.stderr.endswith("ModuleNotFoundError: No module named 'vllm_mars'\n")


@pytest.mark.nightly
def test_arriving_options_install_the_hooks():
    """A process whose plugins are filtered out also verifies by MARS."""
    pickled_options = pickle.dumps(PickledConfig(MarsConfig())).hex()
    probe = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import pickle; pickle.loads(bytes.fromhex('{pickled_options}')); "
            "import vllm.v1.metrics.stats as module; print(module._vllm_mars_patched)",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "VLLM_PLUGINS": ""},
    )
    assert probe.stdout.strip().endswith("True"), probe.stderr
