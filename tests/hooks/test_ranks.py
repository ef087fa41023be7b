"""Start-up fails, and names the rank, where a rank lacks the extension or has another version."""

import copy
import os
import pickle
import socket
import subprocess
import sys
from types import SimpleNamespace

import cloudpickle
import pytest

from vllm_mars import MarsConfig, __version__
from vllm_mars.hooks import ranks
from vllm_mars.hooks.ranks import TravellingOptions

NODE = socket.gethostname()
OURS = "vllm_mars.worker.sampler_v1.MarsRejectionSampler"
VLLMS = "vllm.v1.sample.rejection_sampler.RejectionSampler"


def test_options_arrive_as_they_left():
    options = TravellingOptions(MarsConfig(price=0.3, strict_spans=((1, None),)))
    for arrived in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options)):
        assert type(arrived) is TravellingOptions
        assert arrived.config == options.config


def test_another_version_is_refused_where_it_arrives(monkeypatch):
    monkeypatch.setattr(ranks, "__version__", "0.0.1")
    travelling = pickle.dumps(TravellingOptions(MarsConfig()))
    monkeypatch.undo()
    with pytest.raises(RuntimeError) as refused:
        pickle.loads(travelling)
    assert str(refused.value) == (
        f"vllm-mars {__version__} is installed on the node {NODE}, but the server's options come "
        "from vllm-mars 0.0.1; install 0.0.1 there."
    )


@pytest.mark.nightly
def test_arriving_options_leave_the_hooks():
    """A process whose plugins are filtered verifies as asked."""
    travelling = pickle.dumps(TravellingOptions(MarsConfig())).hex()
    probe = subprocess.run(
        [
            *(sys.executable, "-c"),
            f"import pickle; pickle.loads(bytes.fromhex('{travelling}')); "
            "import vllm.v1.executor.abstract as module; print(module._vllm_mars_patched)",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "VLLM_PLUGINS": ""},
    )
    assert probe.stdout.strip().endswith("True"), probe.stderr


ANSWER = """
import pickle, sys

class Sampler: pass
class Options: to_json = lambda self: {{"theta": 0.9}}
class Carrier: config = Options()
class Config: additional_config = {{"mars": Carrier()}}
class Runner: rejection_sampler, vllm_config = Sampler(), Config()
class Worker: rank, model_runner = 3, Runner()

{before}
print(pickle.loads(bytes.fromhex("{question}"))(Worker()))
"""


@pytest.mark.parametrize(
    ("before", "version"),
    [
        # -I hides the packages of this checkout and of the user.
        ("assert not any('vllm' in name for name in sys.modules)", None),
        ("sys.modules['vllm_mars'] = type('', (), {'__version__': '7'})", None),
        (
            "sys.modules['vllm_mars'] = type('', (), {'__version__': '7'}); "
            "sys.modules['vllm_mars.hooks.plugin'] = sys",
            "7",
        ),
    ],
)
def test_a_worker_answers_without_the_extension(before, version):
    question = cloudpickle.dumps(ranks.question()).hex()
    source = ANSWER.format(before=before, question=question)
    # cloudpickle, which every vLLM has, is all that a worker needs.
    path = (
        f"import sys; sys.path.append({os.path.dirname(os.path.dirname(cloudpickle.__file__))!r})"
    )
    worker = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{path}\n{source}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    answer = (3, NODE, version, "__main__.Sampler", {"theta": 0.9}, False)
    assert worker.stdout.strip() == str(answer), worker.stderr


class Executor:
    """Stands in for vLLM's executor; its workers give these answers."""

    def __init__(self, *answers):
        same = (MarsConfig().to_json(), False)
        self.answers = [answer + same[len(answer) - 4 :] for answer in answers]
        self.parallel_config = SimpleNamespace(node_rank_within_dp=0)
        self.ended = False

    def collective_rpc(self, method):
        assert callable(method)
        return self.answers

    def shutdown(self):
        self.ended = True


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ([(0, "a", __version__, OURS), (1, "b", None, VLLMS)], "rank 1 on the node b has no vllm"),
        (
            [(0, "a", "0.0.1", OURS), (1, "b", None, None)],
            f"rank 0 on the node a has vllm-mars 0.0.1, not {__version__}; rank 1 on the node "
            "b has no vllm-mars loaded. Install",
        ),
        (
            [(0, "a", __version__, OURS), (1, "b", __version__, VLLMS)],
            f"rank 1 on the node b verifies with {VLLMS}. Install vllm-mars {__version__} on every",
        ),
        ([(0, "a", __version__, None)], "no rank has a rejection sampler"),
        (
            [
                (0, "a", __version__, OURS),
                (1, "b", __version__, OURS, MarsConfig(max_loss=0.03).to_json()),
            ],
            "rank 1 on the node b has mars_max_loss=0.03, not 0.02. Install",
        ),
        (
            [(0, "a", __version__, OURS, None)],
            "rank 0 on the node a has mars_max_loss=None, not 0.02",
        ),
    ],
)
def test_a_rank_that_differs_is_named(answers, fault):
    executor = Executor(*answers)
    with pytest.raises(RuntimeError) as refused:
        ranks.require_same_everywhere(executor, MarsConfig())
    assert f"verification is asked for, but {fault}" in str(refused.value)
    assert executor.ended


def test_a_lock_on_a_rank_alone_is_refused_where_requests_may_relax(monkeypatch):
    """There a request that this process allows would end the engine."""
    config = MarsConfig(max_loss=0, limit=0.02)
    answer = (0, "a", __version__, OURS, config.to_json(), True)
    with pytest.raises(RuntimeError, match="rank 0 on the node a has VLLM_MARS_LOCK=strict, but"):
        ranks.require_same_everywhere(Executor(answer), config)
    closed = MarsConfig(max_loss=0)
    ranks.require_same_everywhere(Executor((*answer[:4], closed.to_json(), True)), closed)
    monkeypatch.setenv("VLLM_MARS_LOCK", "strict")
    ranks.require_same_everywhere(Executor(answer), config)


def test_equal_ranks_and_stages_without_a_sampler_pass():
    executor = Executor((0, "a", __version__, None), (1, "b", __version__, OURS))
    ranks.require_same_everywhere(executor, MarsConfig())
    assert not executor.ended
