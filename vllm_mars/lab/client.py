"""Sends and times the requests of one turn with the request function of `vllm bench serve`."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

# vLLM's function reports only this for HTTP status 400.
REFUSED = "Bad Request"


def send_requests(
    base_url: str,
    model: str,
    requests: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    max_tokens: int,
    concurrency: int,
    timeout: float,
) -> tuple[float, list[Any]]:
    """Sends requests to a server's chat endpoint, at most `concurrency` at a time.

    Args:
        requests: prompts, each with the further keys of its request body.

    Returns:
        Seconds from the first request to the last token, and vLLM's `RequestFuncOutput` (with
        `generated_text`, `output_tokens`, `ttft` and `latency`) of each request.

    Raises:
        RuntimeError: a request failed, or all of them took longer than `timeout` seconds.
    """
    import aiohttp
    from vllm.benchmarks.lib import endpoint_request_func as vllm_bench

    url = f"{base_url}/v1/chat/completions"

    async def send_all() -> list[Any]:
        free = asyncio.Semaphore(concurrency)

        async def send_one(prompt: str, body: Mapping[str, Any]) -> Any:
            request = vllm_bench.RequestFuncInput(
                prompt=prompt,
                api_url=url,
                prompt_len=0,
                output_len=max_tokens,
                model=model,
                extra_body=dict(body),
            )
            async with free:
                return await vllm_bench.async_request_openai_chat_completions(request, session)

        connector = aiohttp.TCPConnector(limit=concurrency)
        async with asyncio.timeout(timeout), aiohttp.ClientSession(connector=connector) as session:
            return await asyncio.gather(*(send_one(prompt, body) for prompt, body in requests))

    begin = time.perf_counter()
    try:
        outputs = asyncio.run(send_all())
    except TimeoutError as error:
        raise RuntimeError(
            f"the requests took longer than turn_timeout={timeout:g} s; give them more with "
            "--turn-timeout."
        ) from error
    seconds = time.perf_counter() - begin
    if errors := [output.error.strip() for output in outputs if not output.success]:
        reason = errors[0].splitlines()[-1] if errors[0] else "no reason given"
        if reason == REFUSED:
            reason += (
                ": the usual cause is a prompt, or a --max-tokens, beyond the server's "
                "--max-model-len; give a larger one, as --server-arg=--max-model-len=N"
            )
        raise RuntimeError(f"{len(errors)} of {len(outputs)} requests failed: {reason}")
    return seconds, outputs
