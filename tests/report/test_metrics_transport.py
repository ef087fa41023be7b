"""Counts on their way from the worker to the front end, over vLLM's own wire."""

import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch

from counts import COUNTS, LAYOUT
from vllm_mars import MarsConfig
from vllm_mars.report.counters import Counters
from vllm_mars.report.outputs import FIELD, attach_counters, carrier_of, send_returned
from vllm_mars.report.transport import carry_counts, read_on
from vllm_mars.worker.verification import Returned, Verification


def runner_output(**fields):
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(**{"req_ids": ["a"], "req_id_to_index": {"a": 0}, **fields})


class Runner:
    """Stands in for a model runner: `sampled` and `executed` are what it returns."""

    def __init__(self, backend=None):
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        parallel_config = SimpleNamespace(distributed_executor_backend=backend)
        self.vllm_config = SimpleNamespace(parallel_config=parallel_config)
        self.requests = {}
        self.sampled = None
        self.executed = EMPTY_MODEL_RUNNER_OUTPUT

    def execute_model(self, scheduler_output):
        return self.executed

    def sample_tokens(self, grammar_output):
        return self.sampled


def attached(runner):
    """Counters whose counts leave with the runner's outputs."""
    counters = Counters(LAYOUT, torch.device("cpu"))
    attach_counters(runner, Verification(MarsConfig(), [], counters))
    return counters


@pytest.fixture
def on_rank(monkeypatch):
    import vllm.distributed

    def set_rank(rank):
        monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_rank", lambda: rank)

    return set_rank


def test_counts_leave_with_the_outputs_of_steps(on_rank):
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    on_rank(0)
    runner = Runner()
    counters = attached(runner)
    # vLLM's memory profiling.
    counters.device_counts += 7
    runner.sampled = runner_output()
    assert runner.sample_tokens(None) is runner.sampled
    assert not hasattr(runner.sampled, FIELD)
    counters.device_counts += torch.tensor(COUNTS)
    assert getattr(runner.sample_tokens(None), FIELD) == COUNTS

    # Nothing is lost where a step has no output of its own, and nothing lands in the shared one.
    counters.device_counts += torch.tensor(COUNTS)
    for shared in (None, EMPTY_MODEL_RUNNER_OUTPUT):
        runner.sampled = shared
        assert runner.sample_tokens(None) is shared
    # With requests left, nothing is waited for.
    runner.requests["a"] = None
    assert runner.execute_model(None) is EMPTY_MODEL_RUNNER_OUTPUT
    runner.requests.clear()
    last = runner.execute_model(None)
    assert getattr(last, FIELD) == COUNTS
    assert dataclasses.astuple(last) == dataclasses.astuple(EMPTY_MODEL_RUNNER_OUTPUT)
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, FIELD)
    assert runner.execute_model(None) is EMPTY_MODEL_RUNNER_OUTPUT
    assert getattr(pickle.loads(pickle.dumps(last)), FIELD) == COUNTS


@pytest.mark.parametrize("backend", [None, "external_launcher"])
def test_of_other_ranks_only_an_external_launchers_are_read(on_rank, backend):
    """Each of these is an engine of its own, whose outputs nobody else reads."""
    on_rank(1)
    runner = Runner(backend)
    if backend is None:
        # A copy would need an accelerator.
        table = Returned({0: "a"}, torch.empty(1, 2, 5, device="meta"))
        send_returned(runner, SimpleNamespace(returned=[table]))
    counters = attached(runner)
    runner.sampled = runner_output()
    runner.sample_tokens(None)
    counters.device_counts += 1
    assert hasattr(runner.sample_tokens(None), FIELD) == (backend is not None)


def test_asynchronous_outputs_carry_the_counts():
    """Both runners' classes, built without the CUDA stream that their constructors need."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    for kind, name in (
        (AsyncGPUModelRunnerOutput, "_model_runner_output"),
        (AsyncOutput, "model_runner_output"),
    ):
        pending, output = kind.__new__(kind), runner_output()
        setattr(pending, name, output)
        assert carrier_of(pending) is output


class Scheduler:
    """Stands in for vLLM's scheduler."""

    log_stats, left = True, 0

    def schedule(self):
        pass

    def has_requests(self):
        return self.left > 0

    def update_from_output(self, scheduler_output, model_runner_output):
        return self.make_stats(None)

    def make_stats(self, spec_decoding_stats=None):
        from vllm.v1.metrics.stats import SchedulerStats

        return SchedulerStats() if self.log_stats else None


def test_the_scheduler_passes_the_counts_on():
    scheduler = Scheduler()
    carry_counts(scheduler, MarsConfig())

    def step(increase=None):
        output = runner_output()
        if increase is not None:
            setattr(output, FIELD, increase)
        scheduler.schedule()
        stats = scheduler.update_from_output(None, output)
        assert not hasattr(output, FIELD)
        return stats and getattr(stats, FIELD)

    assert step() is None
    assert step(COUNTS) == COUNTS
    assert step() is None
    scheduler.log_stats = False
    assert step([1] * LAYOUT.size) is None
    assert step(COUNTS) is None
    scheduler.log_stats = True
    assert step() == [count + 1 for count in COUNTS]


def test_an_llm_reads_until_its_engine_is_idle():
    """Of steps that are scheduled ahead, and of one that tells the workers of an end."""
    from vllm.v1.engine import EngineCoreOutputs

    scheduler, ahead = Scheduler(), []
    carry_counts(scheduler, MarsConfig())

    def get_output():
        # As a step with a queue of two batches: nothing comes back as long as that is not full.
        while len(ahead) < 2 and scheduler.left:
            scheduler.left -= 1
            scheduler.schedule()
            ahead.append(runner_output())
        outputs = EngineCoreOutputs()
        outputs.scheduler_stats = scheduler.update_from_output(None, ahead.pop(0))
        return outputs

    parallel = SimpleNamespace(data_parallel_size=1)
    client = SimpleNamespace(get_output=get_output)
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel),
        engine_core=client,
        has_unfinished_requests=lambda: False,
    )
    read_on(engine, MarsConfig())
    assert not engine.has_unfinished_requests()
    for scheduler.left in (1, 2, 5):
        steps = scheduler.left
        client.get_output()
        for _ in range(steps - 1):
            assert engine.has_unfinished_requests()
            client.get_output()
        assert not engine.has_unfinished_requests()
    # Without statistics nothing is promised.
    scheduler.log_stats, scheduler.left = False, 2
    client.get_output()
    assert not engine.has_unfinished_requests()
