"""Prints a running server's rule and the `vllm_xargs` of a request that gets it.

    python examples/lossy.py http://localhost:8000

A request without a bound gets the server's rule. If the server is strict by default, the request
has to name a bound: MAX_LOSS, by default the largest allowed. On every server MAX_LOSS adds a bound
to the rule. Exit status 1 if no request can be lossy, or if an overrides file sets another rule
than the server's.
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
    """Returns the option that names the rule, the request's `vllm_xargs`, and the rule in words.

    Args:
        metrics: the text at the server's `/metrics`.
        max_loss: the request's bound; None for the server's setting.

    Raises:
        ValueError: such a request would not be lossy, or would get another rule.
    """
    samples = [s for family in text_string_to_metric_families(metrics) for s in family.samples]
    info = next((s.labels for s in samples if s.name == "vllm:mars_info"), None)
    if info is None:
        raise ValueError(
            "it has no metric vllm:mars_info; start it with rejection_sample_method 'mars' and "
            "without --disable-log-stats"
        )
    for sample in samples:
        if sample.name == "vllm:mars_override" and not math.isnan(sample.value):
            raise ValueError(
                f"VLLM_MARS_OVERRIDES holds requests to {sample.labels['option']}="
                f"{sample.value:g}; write {{}} into that file first"
            )
    most = next(
        (s.value for s in samples if s.name == "vllm:mars_max_loss_nats_per_token"), math.inf
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
    """Reads the server's metrics; returns the exit status."""
    url = sys.argv[1].rstrip("/")
    max_loss = os.environ.get("MAX_LOSS")
    try:
        metrics = fetch(f"{url}/metrics", timeout=10).decode()
        option, xargs, rule = lossy(metrics, float(max_loss) if max_loss else None)
    except (OSError, ValueError) as error:
        print(f"error: {url}: {str(error).rstrip('.')}.", file=sys.stderr)
        return 1
    print(f"A lossy request to {url} has {rule}.", file=sys.stderr)
    print(option, json.dumps({"vllm_xargs": xargs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
