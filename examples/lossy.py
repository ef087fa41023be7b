"""Prints a running server's rule, and the `vllm_xargs` by which a request gets it.

    python examples/lossy.py http://localhost:8000

A request that names no bound gets the server's own rule, whatever it is. If the server is strict
unless a request asks, the request has to name one: MAX_LOSS, by default the largest allowed. On any
server MAX_LOSS puts a bound over the rule. Exit status 1: no request can be lossy, or an overrides
file holds requests to another rule than the server's.
"""

import json
import math
import os
import sys

from prometheus_client.parser import text_string_to_metric_families

from vllm_mars.kernels.rules import RULES
from vllm_mars.servers.scrape import fetch

STRICT = {rule.option: rule.strict for rule in RULES.values()}


def lossy(metrics: str, max_loss: float | None) -> tuple[str, dict[str, float], str]:
    """The option that names the rule, the request's `vllm_xargs`, and the rule in words.

    Args:
        metrics: the text at the server's `/metrics`.
        max_loss: the bound to ask for; None for the server's own setting.

    Raises:
        ValueError: the server has no rule that such a request would get.
    """
    samples = [it for family in text_string_to_metric_families(metrics) for it in family.samples]
    info = next((it.labels for it in samples if it.name == "vllm:mars_info"), None)
    if info is None:
        raise ValueError(
            "it has no metric vllm:mars_info; start it with rejection_sample_method 'mars' and "
            "without --disable-log-stats"
        )
    for it in samples:
        if it.name == "vllm:mars_override" and not math.isnan(it.value):
            raise ValueError(
                f"VLLM_MARS_OVERRIDES holds requests to {it.labels['option']}={it.value:g}; write "
                "{} into that file first"
            )
    most = next(
        (it.value for it in samples if it.name == "vllm:mars_max_loss_nats_per_token"), math.inf
    )
    option, value = info["rule"], float(info["value"])
    if value == STRICT.get(option) or most == 0:
        raise ValueError(
            f"it has {option}={value:g} and is strict for all requests; start it with another "
            "setting, or with a mars_limit"
        )
    if max_loss is None and info["lossy"] == "false":
        max_loss = most
    if max_loss is not None:
        if not 0 < max_loss <= most:
            raise ValueError(
                f"MAX_LOSS={max_loss:g} is outside (0, {most:g}]; choose a value there"
            )
        bound = f"a bound of {max_loss:g} nats per token"
    elif most < math.inf:
        bound = "the server's bound"
    else:
        bound = "no bound"
    rule = bound if option == "mars_max_loss" else f"{option}={value:g} with {bound}"
    return option, {} if max_loss is None else {"mars_max_loss": max_loss}, rule


def main() -> int:
    """Asks the server; returns the exit status."""
    url, given = sys.argv[1].rstrip("/"), os.environ.get("MAX_LOSS")
    try:
        metrics = fetch(f"{url}/metrics", timeout=10).decode()
        option, xargs, rule = lossy(metrics, float(given) if given else None)
    except (OSError, ValueError) as error:
        print(f"error: {url}: {str(error).rstrip('.')}.", file=sys.stderr)
        return 1
    print(f"A lossy request to {url} has {rule}.", file=sys.stderr)
    print(option, json.dumps({"vllm_xargs": xargs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
