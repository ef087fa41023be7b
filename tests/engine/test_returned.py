"""What the scheduler collects for the requests that ask what verification did."""

from types import SimpleNamespace

from vllm_mars import MarsConfig
from vllm_mars.engine.returned import collect_relaxed
from vllm_mars.engine.transport import REQUEST_FIELD
from vllm_mars.runner.outputs import RETURNED_FIELD

NAN = float("nan")


class Scheduler:
    """What the collection touches; a further input goes to the request of its id."""

    def __init__(self):
        self.requests = {}
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=3)
        )
        collect_relaxed(self, MarsConfig(theta=0.9))

    def add_request(self, request):
        self.requests.setdefault(request.request_id, request)

    def update_from_output(self, scheduler_output, model_runner_output):
        for request in self.requests.values():
            request.num_output_tokens += model_runner_output.produced

    def step(self, produced, rows):
        output = SimpleNamespace(produced=produced, **{RETURNED_FIELD: rows})
        self.update_from_output(None, output)


class Request(SimpleNamespace):
    """Told apart by identity, as vLLM's are."""

    __hash__ = object.__hash__


def request(temperature=0.0, **own):
    params = {"temperature": temperature, "extra_args": own, "structured_outputs": None}
    return Request(
        request_id="a",
        sampling_params=SimpleNamespace(**params),
        num_output_tokens=0,
        spec_decode_metrics=None,
    )


def test_what_a_stop_cuts_off_is_left_out():
    scheduler = Scheduler()
    scheduler.add_request(request(mars_return=True))
    scheduler.step(3, {"a": [0.5, NAN, 0.25, NAN]})
    scheduler.step(1, {"a": [1.0, 1.0, NAN, NAN]})
    assert getattr(scheduler.requests["a"].spec_decode_metrics, REQUEST_FIELD) == {
        "theta": 0.9,
        "num_relaxed_tokens": 3,
        "relaxed_positions": [0, 2, 3],
        "loss_nats": [0.5, 0.25, 1.0],
    }


def test_a_request_that_samples_is_told_of_each_token():
    scheduler = Scheduler()
    scheduler.add_request(request(1.0, mars_return=True))
    # The first token comes without a draft, and a stop cuts the last step off.
    scheduler.step(1, {})
    scheduler.step(2, {"a": [0.5, -0.25, NAN, NAN]})
    scheduler.step(1, {"a": [0.125, 1.0, 0.0, NAN]})
    assert getattr(scheduler.requests["a"].spec_decode_metrics, REQUEST_FIELD) == {
        "theta": 0.9,
        "draft_sample_method": "greedy",
        "log_ratios": [0.0, 0.5, -0.25, 0.125],
    }


def test_a_further_input_may_ask_first():
    scheduler = Scheduler()
    scheduler.add_request(request())
    scheduler.step(2, {})
    scheduler.add_request(request(mars_return=True))
    scheduler.step(2, {"a": [NAN, 1.0, NAN, NAN]})
    told = getattr(scheduler.requests["a"].spec_decode_metrics, REQUEST_FIELD)
    assert told["relaxed_positions"] == [3]
