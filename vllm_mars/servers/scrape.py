"""HTTP requests to vLLM servers and the counters of their `/metrics`."""

import http.client
import json
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai

DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
GENERATED_TOKENS = "vllm:generation_tokens_total"
LOST_NATS = "vllm:mars_lost_nats_total"
GAINED = "vllm:mars_gained_acceptance_total"
VERIFIED = "vllm:mars_verified_positions_total"
# Positions of requests that are not strict.
RELAXABLE = "vllm:mars_relaxable_positions_total"
REFUSED = "vllm:mars_refused_positions_total"
DRIFT_UP = "vllm:mars_drift_up_nats_total"
DRIFT_DOWN = "vllm:mars_drift_down_nats_total"
ALLOWED = "vllm:mars_max_loss_nats_per_token"


def fetch(url: str, timeout: float, body: Mapping[str, Any] | None = None) -> bytes:
    """Sends a GET request or, with a body, posts JSON; uses no proxy on this machine.

    Raises OSError if there is no answer within `timeout` seconds, or an HTTP error
    (`urllib.error.HTTPError`).
    """
    # None is the environment's proxies.
    proxies = urllib.request.ProxyHandler({} if _is_here(url) else None)
    opener = urllib.request.build_opener(proxies)
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with opener.open(request, timeout=timeout) as answer:
            content: bytes = answer.read()
    except http.client.HTTPException as error:
        # The port is not a number, or not an HTTP server's.
        raise OSError(f"{url}: {error!r}") from error
    return content


def openai_client(base_url: str, timeout: float, api_key: str = "none") -> "openai.OpenAI":
    """Returns a client of `base_url` + "/v1", without retries, which would distort times."""
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
    return urllib.parse.urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def totals(url: str, timeout: float) -> dict[str, float]:
    """Reads Prometheus metrics, summed over engines and models.

    Returns:
        Values by sample name (counters end in `_total`). Labels other than `engine` and
        `model_name` are part of the name, sorted: `vllm:..._per_pos_total{position="0"}`.
        Histogram buckets are omitted, but not their `_sum` and `_count`.

    Raises OSError as `fetch`, and ValueError if the answer is not Prometheus metrics.
    """
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(fetch(url, timeout).decode()):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                text = ",".join(
                    f'{label}="{value}"'
                    for label, value in sorted(sample.labels.items())
                    if label not in ("engine", "model_name")
                )
                key = f"{sample.name}{{{text}}}" if text else sample.name
                sums[key] = sums.get(key, 0.0) + sample.value
    return sums
