"""Reports that leave a worker with the outputs of its steps."""

import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch

from counts import COUNTS, LAYOUT
from vllm_mars.report.carrier import StepReport, found_on
from vllm_mars.report.counters import Counters
from vllm_mars.report.worker import StepReports, carrier_of


def runner_output(**fields):
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(**{"req_ids": ["a"], "req_id_to_index": {"a": 0}, **fields})


class Runner:
    """A model runner that returns `sampled` and `executed`."""

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
    reports = StepReports(Counters(LAYOUT.num_speculative_tokens, torch.device("cpu")))
    reports.attach_to_runner(runner)
    return reports


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
    counters = attached(runner).counters
    # Counts of vLLM's memory profiling are dropped.
    counters.device_counts += 7
    runner.sampled = runner_output()
    assert runner.sample_tokens(None) is runner.sampled
    assert found_on(runner.sampled) is None
    counters.device_counts += torch.tensor(COUNTS)
    assert found_on(runner.sample_tokens(None)) == StepReport(COUNTS)

    # A step without its own output keeps its counts, and never changes the shared output.
    counters.device_counts += torch.tensor(COUNTS)
    for shared in (None, EMPTY_MODEL_RUNNER_OUTPUT):
        runner.sampled = shared
        assert runner.sample_tokens(None) is shared
    # Counts are not flushed while requests are left.
    runner.requests["a"] = None
    assert runner.execute_model(None) is EMPTY_MODEL_RUNNER_OUTPUT
    runner.requests.clear()
    last = runner.execute_model(None)
    assert found_on(last) == StepReport(COUNTS)
    assert dataclasses.astuple(last) == dataclasses.astuple(EMPTY_MODEL_RUNNER_OUTPUT)
    assert found_on(EMPTY_MODEL_RUNNER_OUTPUT) is None
    assert runner.execute_model(None) is EMPTY_MODEL_RUNNER_OUTPUT
    assert found_on(pickle.loads(pickle.dumps(last))) == StepReport(COUNTS)


@pytest.mark.parametrize("backend", [None, "external_launcher"])
def test_other_ranks_report_only_with_an_external_launcher(on_rank, backend):
    """Each rank is then a separate engine."""
    on_rank(1)
    runner = Runner(backend)
    reports = attached(runner)
    if backend is None:
        reports.step_counters(1, torch.device("meta"), {0: "a"})
        # A copy would need an accelerator.
        reports.copy_to_host()
    runner.sampled = runner_output()
    runner.sample_tokens(None)
    reports.counters.device_counts += 1
    assert (found_on(runner.sample_tokens(None)) is None) == (backend is None)


def test_an_asynchronous_output_waits_for_its_report(on_rank):
    """It also carries the counts of that time."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    class Output(AsyncModelRunnerOutput):
        def __init__(self):
            self.model_runner_output = runner_output()

        def get_output(self):
            return self.model_runner_output

        # vLLM 0.33 calls it.
        def get_kv_connector_output(self):
            return None

    waits = []
    event = SimpleNamespace(synchronize=lambda: waits.append(1))
    on_rank(0)
    runner = Runner()
    reports = attached(runner)
    runner.sample_tokens(None)
    table = torch.tensor([[[0.5, 1.0], [0.0, 0.25]], [[2.0, 3.0], [4.0, 5.0]]])

    def sample(grammar_output):
        reports.step_counters(2, torch.device("cpu"), {1: "a"})
        (asked,) = reports.requested_tables
        reports.requested_tables[:] = [asked._replace(copy=(table, event))]
        reports.counters.device_counts += torch.tensor(COUNTS)
        return runner.sampled

    runner = Runner()
    runner.sample_tokens, runner.sampled = sample, Output()
    reports.attach_to_runner(runner)
    output = runner.sample_tokens(None)
    assert not waits
    assert found_on(output.get_output()) == StepReport(COUNTS, {"a": [[2.0, 4.0], [3.0, 5.0]]})
    assert waits


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
