"""The arguments of `vllm-mars demo`."""

from pathlib import Path
from typing import Any

NEEDED = ("numpy", "openai", "prometheus_client", "rich")


def add_parser(commands: Any) -> None:
    """Adds the command to `vllm-mars`."""
    parser = commands.add_parser(
        "demo",
        help="compare autoregressive, strict and margin-aware decoding on real vLLM servers",
        description="Serves a model three times, asks each server the same prompts one at a time "
        "and compares speed, acceptance and answers. By default it uses the packaged model with "
        "its EAGLE-3 head, the packaged prompts, and the recommended price with a bound on the "
        "loss; another model drafts with ngram, 4 tokens.",
    )
    add = parser.add_argument
    add("--model", metavar="MODEL", help="default: the packaged model")
    add("--draft", metavar="DRAFT",
        help="ngram, suffix, mtp, or the directory or name of a draft model or head")  # fmt: skip
    add("--theta", type=float, help="mars_theta, in (0, 1], instead of a price")
    add("--price", type=float, metavar="NATS",
        help="mars_price, >= 0, without a bound; default 0.3 with mars_max_loss 0.02")  # fmt: skip
    add("--num-speculative-tokens", type=int, metavar="K", help="default: the head's, else 4")
    add("--prompts", type=Path, metavar="FILE", help="JSON lines with 'prompt' or 'turns'")
    add("--max-tokens", type=int, metavar="N", help="longest answer; default 24")
    add("--repeats", type=int, metavar="N", help="timed passes; default 1")
    add("--short", action="store_true", default=None,
        help="four prompts only: shows that it works, not how fast")  # fmt: skip
    add("--output", type=Path, metavar="FILE", help="default build/demo.json; logs go beside it")
    add("--startup-timeout", type=float, metavar="SECONDS", help="per server; default 600")
    add("--server-arg", dest="server_args", action="append", metavar="ARG",
        help="one more argument of `vllm serve`, such as --server-arg=--max-model-len=1024; "
        "repeatable")  # fmt: skip


def run(**options: Any) -> int:
    """Runs the demo, prints the comparison and writes the result file."""
    from rich.console import Console

    from vllm_mars.demo.options import DemoOptions
    from vllm_mars.demo.report import print_report
    from vllm_mars.demo.run import run_demo
    from vllm_mars.local.result_file import write_json

    results = run_demo(DemoOptions(**options))
    print_report(results, Console())
    write_json(results.options.output, results.to_json())
    Console(stderr=True).print(f"wrote {results.options.output}", soft_wrap=True)
    return 0
