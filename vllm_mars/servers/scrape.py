"""HTTP requests to vLLM servers, and what their `/metrics` count."""

import http.client
import json
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
GENERATED_TOKENS = "vllm:generation_tokens_total"
LOST_NATS = "vllm:mars_lost_nats_total"
GAINED = "vllm:mars_gained_acceptance_total"
VERIFIED = "vllm:mars_verified_positions_total"
# Those of requests that are not strict.
RELAXABLE = "vllm:mars_relaxable_positions_total"
REFUSED = "vllm:mars_refused_positions_total"
DRIFT_UP = "vllm:mars_drift_up_nats_total"
DRIFT_DOWN = "vllm:mars_drift_down_nats_total"
ALLOWED = "vllm:mars_max_loss_nats_per_token"

LOOPBACK = ("localhost", "127.0.0.1", "::1")
# For child processes that ask a server on this machine.
NO_PROXY = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def fetch(url: str, timeout: float, body: Mapping[str, Any] | None = None) -> bytes:
    """Asks a server; on this machine not through a proxy, which would not reach it.

    Args:
        url: what to get, or to post to.
        timeout: in seconds.
        body: what to post, as JSON.

    Raises:
        OSError: nothing answers, or with an HTTP error (`urllib.error.HTTPError`).
    """
    handlers = [urllib.request.ProxyHandler({})] if _is_here(url) else []
    opener = urllib.request.build_opener(*handlers)
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with opener.open(request, timeout=timeout) as answer:
            content: bytes = answer.read()
    except http.client.HTTPException as error:
        # A port that is no number, or what answers there is no HTTP server.
        raise OSError(f"{url}: {error!r}") from error
    return content


def openai_client(base_url: str, timeout: float, api_key: str = "none") -> "openai.OpenAI":
    """A client of a server, named without `/v1`, that uses no proxy on this machine.

    It does not try again, which would spoil times.
    """
    import openai

    http_client = openai.DefaultHttpxClient(trust_env=not _is_here(base_url))
    return openai.OpenAI(
        base_url=f"{base_url}/v1",
        api_key=api_key,
        timeout=timeout,
        max_retries=0,
        http_client=http_client,
    )


def _is_here(url: str) -> bool:
    return urllib.parse.urlsplit(url).hostname in LOOPBACK


def totals(url: str, timeout: float) -> dict[str, float]:
    """Reads Prometheus metrics within so many seconds, summed over engines and models.

    Returns:
        Sample name (counters end in `_total`) to value. A label other than `engine` and
        `model_name` stays in the name, sorted: `vllm:..._per_pos_total{position="0"}`. Histogram
        buckets are left out; their `_sum` and `_count` are there.

    Raises:
        OSError: as `fetch`.
        ValueError: the answer is not Prometheus metrics.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(fetch(url, timeout).decode()):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                text = ",".join(
                    f'{label}="{value}"'
                    for label, value in sorted(sample.labels.items())
                    if label not in ("engine", "model_name")
                )
                key = f"{sample.name}{{{text}}}" if text else sample.name
                found[key] = found.get(key, 0.0) + sample.value
    return found
