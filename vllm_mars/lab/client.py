"""One turn's requests, sent and timed by the request function of `vllm bench serve`."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

# All that vLLM's function keeps of an answer with HTTP status 400.
REFUSED = "Bad Request"


def ask(
    base_url: str,
    model: str,
    requests: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    max_tokens: int,
    concurrency: int,
    timeout: float,
) -> tuple[float, list[Any]]:
    """Asks a server's chat endpoint, so many requests at a time.

    Args:
        requests: each one's prompt, and what its body has beside that.

    Returns:
        The seconds from the first request to the last token, and for each request vLLM's
        `RequestFuncOutput`: `generated_text`, `output_tokens`, `ttft` and `latency`.

    Raises:
        RuntimeError: a request failed, or all together took longer than `timeout` seconds.
    """
    import aiohttp
    from vllm.benchmarks.lib import endpoint_request_func as vllm_bench

    url = f"{base_url}/v1/chat/completions"

    async def ask_all() -> list[Any]:
        free = asyncio.Semaphore(concurrency)

        async def ask_one(prompt: str, body: Mapping[str, Any]) -> Any:
            asked = vllm_bench.RequestFuncInput(
                prompt, url, 0, max_tokens, model, extra_body=dict(body)
            )
            async with free:
                return await vllm_bench.async_request_openai_chat_completions(asked, session)

        connector = aiohttp.TCPConnector(limit=concurrency)
        async with asyncio.timeout(timeout), aiohttp.ClientSession(connector=connector) as session:
            return await asyncio.gather(*(ask_one(*request) for request in requests))

    begin = time.perf_counter()
    try:
        found = asyncio.run(ask_all())
    except TimeoutError as error:
        raise RuntimeError(
            f"the requests took longer than turn_timeout={timeout:g} s; give them more with "
            "--turn-timeout."
        ) from error
    seconds = time.perf_counter() - begin
    if failed := [it.error.strip() for it in found if not it.success]:
        reason = failed[0].splitlines()[-1] if failed[0] else "no reason given"
        if reason == REFUSED:
            reason += (
                ": the usual cause is a prompt, or a --max-tokens, beyond the server's "
                "--max-model-len; give a larger one, as --server-arg=--max-model-len=N"
            )
        raise RuntimeError(f"{len(failed)} of {len(found)} requests failed: {reason}")
    return seconds, found
