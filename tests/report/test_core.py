"""Reports on their way from the engine core to the server's answers and metrics."""

from types import SimpleNamespace

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics import stats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from counts import COUNTS, LAYOUT
from vllm_mars import MarsConfig
from vllm_mars.report.answers import collect_rows
from vllm_mars.report.carrier import StepReport, declare_fields, found_on, put
from vllm_mars.report.core import forward_reports
from vllm_mars.report.metrics import drain_counts

NAN = float("nan")
declare_fields(stats)


class Scheduler:
    """The part of vLLM's scheduler that the hook uses; a streamed input joins its request."""

    def __init__(self):
        self.requests, self.left, self.log_stats = {}, 0, True
        self.finished_req_ids = set()
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=3)
        )
        forward_reports(self, MarsConfig(theta=0.9))

    def add_request(self, request):
        self.requests.setdefault(request.request_id, request)

    def schedule(self):
        pass

    def has_unfinished_requests(self):
        return self.left > 0

    def has_requests(self):
        # A KV connector keeps ended requests until another server has read their cache.
        return True

    def update_from_output(self, scheduler_output, model_runner_output):
        tokens = [7] * model_runner_output.produced
        outputs = [EngineCoreOutput(request_id, tokens) for request_id in self.requests]
        return {0: EngineCoreOutputs(outputs=outputs, scheduler_stats=self.make_stats())}

    def make_stats(self):
        return stats.SchedulerStats() if self.log_stats else None


def stepped(scheduler, report=None, produced=0):
    """Runs a step and returns its outputs as decoded by the server."""
    scheduler.schedule()
    output = SimpleNamespace(produced=produced)
    if report is not None:
        put(output, report)
    sent = scheduler.update_from_output(None, output)[0]
    assert found_on(output) is None
    return MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))


class State:
    """A request in the front end; like vLLM's, it receives the metrics before the tokens."""

    def __init__(self, scheduler):
        self.scheduler, self.tokens = scheduler, []
        self.spec_decode_metrics = None
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: len(self.tokens))

    def step(self, produced, rows, num_appended=None):
        outputs = stepped(self.scheduler, StepReport(rows=rows), produced).outputs
        for output in outputs:
            if output.spec_decode_metrics is not None:
                self.spec_decode_metrics = output.spec_decode_metrics
            self.tokens += output.new_token_ids[:num_appended]
        return outputs

    def report(self):
        return found_on(self.spec_decode_metrics)


collect_rows(State)


def row(*values):
    """The step's table for request "a": the loss of each token."""
    return {"a": [(value, 0.0) for value in values]}


def request(**extra_args):
    params = SimpleNamespace(
        temperature=0.0, extra_args=extra_args, structured_outputs=None, stop_token_ids=None
    )
    return SimpleNamespace(request_id="a", sampling_params=params, spec_decode_metrics=None)


def started(**extra_args):
    scheduler = Scheduler()
    scheduler.add_request(request(**extra_args))
    return State(scheduler)


def test_tokens_after_a_stop_are_not_reported():
    state = started(mars_return=True)
    state.step(3, row(0.5, NAN, 0.25, NAN))
    state.step(1, row(1.0, 1.0, NAN, NAN))
    # The front end cuts off the last token at a stop string.
    state.step(3, row(NAN, 2.0, 2.0, NAN), num_appended=2)
    assert state.report() == {
        "theta": 0.9,
        "num_relaxed_tokens": 4,
        "relaxed_positions": [0, 2, 3, 5],
        "loss_nats": [0.5, 0.25, 1.0, 2.0],
    }


def test_a_step_sends_only_its_new_rows():
    state = started(mars_return=True)
    state.scheduler.requests["a"].spec_decode_metrics.per_step_accepted = [1] * 1000
    for _ in range(3):
        (output,) = state.step(2, row(NAN, 1.0, NAN, NAN))
        sent = output.spec_decode_metrics
        assert sent.per_step_accepted == [] and len(sent.mars["row"]) == 2


def test_a_later_input_of_a_request_may_ask_for_the_report():
    state = started()
    state.step(2, {})
    assert state.spec_decode_metrics is None
    state.scheduler.add_request(request(mars_return=True))
    state.step(2, row(NAN, 1.0, NAN, NAN))
    assert state.report()["relaxed_positions"] == [3]


def test_an_aborted_request_is_forgotten():
    """Another request may use its id and not ask for the report."""
    state = started(mars_return=True)
    for extra_args in ({}, {"mars_return": True}, {}):
        del state.scheduler.requests["a"]
        state.scheduler.add_request(request(**extra_args))
        (output,) = state.step(1, {})
        assert (output.spec_decode_metrics is None) == (not extra_args)


def test_the_scheduler_passes_the_counts_on():
    scheduler = Scheduler()

    def step(counts=None):
        sent = stepped(scheduler, counts and StepReport(counts)).scheduler_stats
        return sent and found_on(sent) and found_on(sent).counts

    assert step() is None
    assert step(COUNTS) == COUNTS
    assert step() is None
    scheduler.log_stats = False
    assert step([1] * LAYOUT.size) is None
    assert step(COUNTS) is None
    scheduler.log_stats = True
    assert step() == [count + 1 for count in COUNTS]


def test_more_follows_until_no_request_is_left():
    scheduler = Scheduler()

    def has_more():
        report = found_on(stepped(scheduler).scheduler_stats)
        return report is not None and report.has_more

    assert not has_more()
    scheduler.finished_req_ids.add("a")
    assert has_more()
    scheduler.finished_req_ids.clear()
    assert not has_more()


def test_an_llm_reads_until_its_engine_is_idle():
    """Including steps scheduled ahead, and the step that ends a request in the workers."""
    scheduler, ahead = Scheduler(), []

    def get_output():
        # A step with a queue of two batches returns nothing until the queue is full.
        while len(ahead) < 2 and scheduler.left:
            scheduler.left -= 1
            scheduler.schedule()
            ahead.append(SimpleNamespace(produced=0))
        return scheduler.update_from_output(None, ahead.pop(0))[0]

    parallel = SimpleNamespace(data_parallel_size=1)
    client = SimpleNamespace(get_output=get_output)
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel),
        engine_core=client,
        has_unfinished_requests=lambda: False,
    )
    drain_counts(engine, MarsConfig())
    assert not engine.has_unfinished_requests()
    for scheduler.left in (1, 2, 5):
        steps = scheduler.left
        client.get_output()
        for _ in range(steps - 1):
            assert engine.has_unfinished_requests()
            client.get_output()
        assert not engine.has_unfinished_requests()
    # Without statistics there is nothing to read.
    scheduler.log_stats, scheduler.left = False, 2
    client.get_output()
    assert not engine.has_unfinished_requests()
