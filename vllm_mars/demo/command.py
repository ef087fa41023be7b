"""`vllm-mars demo`: a small sweep of three servers, and a view of it."""

import json
from pathlib import Path
from typing import Any

from vllm_mars.experiments.sweep import command as sweep
from vllm_mars.experiments.sweep.plan import SweepOptions
from vllm_mars.local.draft_head import PACKAGED_HEAD, best_length, is_head
from vllm_mars.local.drafts import NGRAM, RECOMMENDED
from vllm_mars.local.prompts import PACKAGED

NEEDED = sweep.NEEDED
OUTPUT = Path("build/demo.jsonl")
# Draft tokens per step where neither the user nor the draft says how many.
NUM_SPECULATIVE_TOKENS = 4
SHORT_PROMPTS = 4


def add_parser(commands: Any) -> None:
    """Adds the command to `vllm-mars`."""
    parser = commands.add_parser(
        "demo",
        help="compare autoregressive, strict and margin-aware decoding on real vLLM servers",
        description="Serves a model three times, asks each server the same prompts one at a time "
        "and compares speed, acceptance and answers: a small `vllm-mars sweep`. By default it uses "
        "the packaged model with its EAGLE-3 head, the packaged prompts, and the recommended price "
        "with a bound on the loss; another model drafts with ngram, 4 tokens.",
    )
    add = parser.add_argument
    add("--model", metavar="MODEL", help="default: the packaged model")
    add("--draft", metavar="DRAFT",
        help="ngram, suffix, mtp, or the directory or name of a draft model or head")  # fmt: skip
    add("--theta", type=float, help="mars_theta, in (0, 1], instead of a price")
    add("--price", type=float, metavar="NATS",
        help="mars_price, >= 0, without a bound; default 0.3 with mars_max_loss 0.02")  # fmt: skip
    add("--num-speculative-tokens", type=int, metavar="K", help="default: the head's, else 4")
    add("--prompts", metavar="FILE", help="JSON lines with 'prompt'")
    add("--max-tokens", type=int, metavar="N", help="longest answer; default 24")
    add("--repeats", type=int, metavar="N", help="timed passes; default 1")
    add("--short", action="store_true", help="four prompts only: shows that it works, not how fast")
    add("--output", type=Path, default=OUTPUT, metavar="FILE",
        help=f"default {OUTPUT}; what was there moves to FILE.old, logs go beside it")  # fmt: skip
    add("--startup-timeout", type=float, metavar="SECONDS", help="per server; default 600")
    add("--server-arg", dest="server_args", action="append", metavar="ARG",
        help="one more argument of `vllm serve`, such as --server-arg=--max-model-len=1024; "
        "repeatable")  # fmt: skip


def run(output: Path, short: bool, **options: Any) -> int:
    """Runs the demo: measures, judges, prints the comparison."""
    from rich.console import Console

    from vllm_mars.demo.report import print_report
    from vllm_mars.experiments.sweep.datasets import load_dataset
    from vllm_mars.experiments.sweep.run import run_sweep

    chosen = sweep_options(**options, num_prompts=SHORT_PROMPTS if short else 0)
    cells = run_sweep(chosen, output, anew=True)
    for cell in cells:
        if cell.status != "ok":
            raise RuntimeError(f"{cell.key.label}: {cell.reason}")
    prompts = load_dataset(chosen.datasets[0], 0).items
    print_report(cells, {prompt.id: prompt.category for prompt in prompts}, Console())
    if short:
        print("This short form shows that it works, not how fast: leave out --short.")
    return 0


def sweep_options(
    *,
    model: str | None = None,
    draft: str | None = None,
    theta: float | None = None,
    price: float | None = None,
    num_speculative_tokens: int | None = None,
    prompts: str = str(PACKAGED),
    max_tokens: int = 24,
    **options: Any,
) -> SweepOptions:
    """The sweep of a demo: three servers that take turns, eight prompts each.

    Args:
        model: None takes the packaged model.
        draft: None takes the packaged model's EAGLE-3 head, for another model ngram.
        theta, price: of the MARS server; without both the recommended price and bound on the loss.
        num_speculative_tokens: None takes what the head names as its best, else 4.
        prompts: path of a file.
        max_tokens: longest answer.
        options: further ones of the sweep.

    Raises:
        ValueError: an option is out of range, or the head's config.json is broken.
        RuntimeError: the environment forbids lossy verification.
    """
    if theta is not None and price is not None:
        raise ValueError(f"theta={theta} and price={price} are two rules; give one of them.")
    bound = ""
    if theta is None and price is None:
        price = RECOMMENDED["mars_price"]
        bound = json.dumps({"mars_max_loss": RECOMMENDED["mars_max_loss"]})
    if draft is None:
        draft = str(PACKAGED_HEAD) if model is None else NGRAM
    if num_speculative_tokens is None:
        of_head = is_head(Path(draft))
        num_speculative_tokens = best_length(Path(draft)) if of_head else NUM_SPECULATIVE_TOKENS
    return SweepOptions(
        model=model,
        drafts=(draft,),
        methods=("autoregressive", "standard", "mars"),
        thetas=() if theta is None else (theta,),
        gaps=(),
        prices=() if price is None else (price,),
        mars_options=(bound,),
        unprotected=False,
        num_speculative_tokens=(num_speculative_tokens,),
        temperatures=(0.0,),
        concurrencies=(1,),
        datasets=(prompts,),
        block=8,
        side_by_side=3,
        max_tokens=max_tokens,
        **{"repeats": 1, **options},
    )
