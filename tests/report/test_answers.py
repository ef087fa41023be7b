"""Reports in the answers of a server."""

import asyncio
import json
from types import ModuleType, SimpleNamespace

from vllm_mars import MarsConfig
from vllm_mars.hooks.patches import patch_chat
from vllm_mars.hooks.pickled import PickledConfig
from vllm_mars.report.carrier import FIELD


def test_reports_are_added_if_another_plugin_has_wrapped_the_stream():
    """Such a wrapper hides the parameters and is not a generator function."""

    class Serving:
        engine_client = SimpleNamespace(
            vllm_config=SimpleNamespace(
                additional_config={"mars": PickledConfig(MarsConfig(theta=0.9))}
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
    metrics = SimpleNamespace(**{FIELD: {"theta": 0.9}})
    output = SimpleNamespace(index=0, spec_decode_metrics=metrics)

    async def results():
        yield SimpleNamespace(outputs=[output])

    async def chunks(*args, **kwargs):
        answer = Serving().chat_completion_stream_generator(*args, **kwargs)
        return [chunk async for chunk in answer]

    request = SimpleNamespace(vllm_xargs={"mars_return": True})
    for (chunk,) in (
        asyncio.run(chunks(request, results(), "a")),
        asyncio.run(chunks(request, result_generator=results(), request_id="a")),
    ):
        event = json.loads(chunk.removeprefix("data: "))
        assert (event["id"], event["metrics"]) == ("a", {"mars": [{"theta": 0.9}]})
