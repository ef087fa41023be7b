"""What the engine core sends and the front end collects for the requests that ask."""

import asyncio
import inspect
import json
from types import ModuleType, SimpleNamespace

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from vllm_mars import MarsConfig
from vllm_mars.hooks.patches import patch_chat
from vllm_mars.hooks.ranks import TravellingOptions
from vllm_mars.report.outputs import RETURNED_FIELD
from vllm_mars.report.returned import collect_rows, send_rows
from vllm_mars.report.transport import REQUEST_FIELD, declare_field

NAN = float("nan")
declare_field(RequestSpecDecodeMetrics, REQUEST_FIELD, dict | None)


class Scheduler:
    """What the hook touches; a further input goes to the request of its id."""

    def __init__(self):
        self.requests = {}
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=3)
        )
        send_rows(self, MarsConfig(theta=0.9))

    def add_request(self, request):
        self.requests.setdefault(request.request_id, request)

    def update_from_output(self, scheduler_output, model_runner_output):
        tokens = [7] * model_runner_output.produced
        outputs = [EngineCoreOutput(request_id, tokens) for request_id in self.requests]
        return {0: SimpleNamespace(outputs=outputs)}

    @property
    def asking(self):
        return inspect.getclosurevars(self.update_from_output).nonlocals["asking"]


class State:
    """A request in the front end: as vLLM's, it takes in the metrics before the tokens."""

    def __init__(self, scheduler):
        self.scheduler, self.tokens = scheduler, []
        self.spec_decode_metrics = None
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: len(self.tokens))

    def step(self, produced, rows, kept=None):
        model_runner_output = SimpleNamespace(produced=produced, **{RETURNED_FIELD: rows})
        outputs = self.scheduler.update_from_output(None, model_runner_output)[0].outputs
        for output in outputs:
            if output.spec_decode_metrics is not None:
                self.spec_decode_metrics = output.spec_decode_metrics
            self.tokens += output.new_token_ids[:kept]
        return outputs

    def told(self):
        return getattr(self.spec_decode_metrics, REQUEST_FIELD)


collect_rows(State)


def row(*values):
    """What a step's table holds of each of a request's tokens."""
    return {"a": [(value, 0.0) for value in values]}


def request(**own):
    params = {"temperature": 0.0, "extra_args": own}
    params |= {"structured_outputs": None, "stop_token_ids": None}
    return SimpleNamespace(
        request_id="a", sampling_params=SimpleNamespace(**params), spec_decode_metrics=None
    )


def answering(**own):
    scheduler = Scheduler()
    scheduler.add_request(request(**own))
    return State(scheduler)


def test_reports_come_beside_a_plugin_that_hides_parameters():
    """Its wrapper of a stream is no generator function either."""

    class Serving:
        engine_client = SimpleNamespace(
            vllm_config=SimpleNamespace(
                additional_config={"mars": TravellingOptions(MarsConfig(theta=0.9))}
            )
        )

        async def chat_completion_stream_generator(self, request, result_generator, request_id):
            async for _ in result_generator:
                pass
            yield f'data: {{"id": "{request_id}", "choices":[]}}\n\n'

        chat_completion_full_generator = chat_completion_stream_generator

    stream = Serving.chat_completion_stream_generator
    Serving.chat_completion_stream_generator = lambda self, *args, **kw: stream(self, *args, **kw)
    module = ModuleType("vllm.entrypoints.openai.chat_completion.serving")
    module.OpenAIServingChat = Serving
    patch_chat(module)
    metrics = SimpleNamespace(**{REQUEST_FIELD: {"theta": 0.9}})
    output = SimpleNamespace(index=0, spec_decode_metrics=metrics)

    async def results():
        yield SimpleNamespace(outputs=[output])

    async def chunks(*args, **kwargs):
        answer = Serving().chat_completion_stream_generator(*args, **kwargs)
        return [chunk async for chunk in answer]

    asked = SimpleNamespace(vllm_xargs={"mars_return": True})
    for (chunk,) in (
        asyncio.run(chunks(asked, results(), "a")),
        asyncio.run(chunks(asked, result_generator=results(), request_id="a")),
    ):
        told = json.loads(chunk.removeprefix("data: "))
        assert (told["id"], told["metrics"]) == ("a", {"mars": [{"theta": 0.9}]})


def test_what_a_stop_cuts_off_is_left_out():
    state = answering(mars_return=True)
    state.step(3, row(0.5, NAN, 0.25, NAN))
    state.step(1, row(1.0, 1.0, NAN, NAN))
    # A stop string is found in the front end, where a later token is cut off.
    state.step(3, row(NAN, 2.0, 2.0, NAN), kept=2)
    assert state.told() == {
        "theta": 0.9,
        "num_relaxed_tokens": 4,
        "relaxed_positions": [0, 2, 3, 5],
        "loss_nats": [0.5, 0.25, 1.0, 2.0],
    }


def test_a_step_sends_what_it_added():
    state = answering(mars_return=True)
    state.scheduler.requests["a"].spec_decode_metrics.per_step_accepted = [1] * 1000
    for _ in range(3):
        (output,) = state.step(2, row(NAN, 1.0, NAN, NAN))
        sent = output.spec_decode_metrics
        assert sent.per_step_accepted == [] and len(sent.mars["row"]) == 2


def test_a_further_input_may_ask_first():
    state = answering()
    state.step(2, {})
    assert state.spec_decode_metrics is None
    state.scheduler.add_request(request(mars_return=True))
    state.step(2, row(NAN, 1.0, NAN, NAN))
    assert state.told()["relaxed_positions"] == [3]


def test_an_aborted_request_is_forgotten():
    """And its id may come again, from a client that does not ask."""
    state = answering(mars_return=True)
    for own in ({}, {"mars_return": True}, {}):
        del state.scheduler.requests["a"]
        state.scheduler.add_request(request(**own))
        (output,) = state.step(1, {})
        assert (output.spec_decode_metrics is None) == (not own)
        assert bool(state.scheduler.asking) == bool(own)
    del state.scheduler.requests["a"]
    state.step(1, {})
    assert not state.scheduler.asking
