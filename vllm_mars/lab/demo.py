"""`vllm-mars demo`: a small sweep that compares strict verification with MARS."""

import json
from pathlib import Path
from typing import Any

from vllm_mars.lab import sweep_command
from vllm_mars.lab.plan import METHODS, STANDARD, STRICT, SweepOptions
from vllm_mars.lab.prompts import PACKAGED
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.drafts import NGRAM, RECOMMENDED, drafts_of
from vllm_mars.servers.provenance import vllm_device

NEEDED = sweep_command.NEEDED
OUTPUT, SHORT_OUTPUT = Path("build/demo.jsonl"), Path("build/demo-short.jsonl")
MARS = "MARS"
# The fastest K of each rule by temperature; MARS has one K, since one server answers both. Measured
# when the price followed the bound (benchmarks/results/lengths.jsonl at commit 0adc87d).
LENGTHS = {0.0: {STRICT: 3, MARS: 3}, 0.7: {STRICT: 4, MARS: 3}}
# The packaged prompts whose answers people read: MARS is meant for these.
CATEGORIES = (
    "rewriting",
    "summary",
    "list",
    "story",
    "explanation",
    "comparison",
    "writing",
    "instructions",
)
PROMPTS, MAX_TOKENS, BLOCK = 12, 40, 6
SHORT_PROMPTS, SHORT_MAX_TOKENS = 8, 24
# A load average above this, before the demo starts, is other work.
BUSY = 0.7


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="compare strict verification and MARS on real vLLM servers",
        description="Serves a model with vLLM's strict verification and with MARS at the "
        "recommended setting, sends each the same prompts in turn, greedy and at temperature 0.7, "
        "compares speed and loss, and shows two answers: a small sweep. By default it uses the "
        "packaged model with its EAGLE-3 head; other models use ngram drafts.",
    )
    add = parser.add_argument
    add("--model", metavar="MODEL", help="default: the packaged model")
    add("--draft", metavar="DRAFT",
        help="ngram, suffix, mtp, or the directory or name of a draft model or head")  # fmt: skip
    add("--num-speculative-tokens", type=int, metavar="K",
        help="default: the fastest for each rule with the packaged head")  # fmt: skip
    add("--prompts", metavar="FILE", help="JSON lines with 'prompt'; default 12 packaged ones")
    add("--short", action="store_true", help="8 prompts, 24 tokens: a test, not a measurement")
    add("--output", type=Path, metavar="FILE", help=f"default {OUTPUT}; logs go next to it")
    sweep_command.add_shared(add)


def run(short: bool, anew: bool, output: Path | None = None, **options: Any) -> int:
    from rich.console import Console

    from vllm_mars.lab.demo_report import print_report
    from vllm_mars.lab.plan import load_sweep
    from vllm_mars.lab.sweep import run_sweep

    on_cpu = vllm_device()[0] == "cpu"
    sweep = sweep_options(short=short, on_cpu=on_cpu, **options)
    prompts = {prompt.id: prompt.turns[0] for prompt in load_sweep(sweep).prompts}
    path = output or (SHORT_OUTPUT if short else OUTPUT)
    file = run_sweep(sweep, path, retry_failed=True, anew=anew)
    for record in file.records:
        if record.measured is None:
            raise RuntimeError(f"{record.name}: {record.reason}")
    print_report(file, prompts, Console())
    loads = [header.run.get("load_average") or 0.0 for header in file.heads]
    if on_cpu and max(loads) > BUSY:
        print(
            f"Other work ran on this machine (load average {max(loads):.1f} before the demo): read "
            "tokens per step, not speeds, and run it with --anew when the machine is idle."
        )
    if short:
        print("This short form shows that it works, not how fast: leave out --short.")
    return 0


def sweep_options(
    *,
    short: bool = False,
    on_cpu: bool,
    model: str | None = None,
    draft: str | None = None,
    num_speculative_tokens: int | None = None,
    prompts: str | None = None,
    **options: Any,
) -> SweepOptions:
    """Returns the demo's sweep: MARS and strict verification in its best lossless setting.

    vLLM's CPU server samples wrong tokens under speculation, so there the strict rule of sampled
    requests is MARS at price 0, which is equivalent.
    """
    draft = draft or (str(PACKAGED_HEAD) if model is None else NGRAM)
    _, probabilistic = drafts_of(draft)
    block = {"rejection_sample_method": "block"} if probabilistic else METHODS[STANDARD]
    lossless = {**((METHODS[STRICT] if on_cpu else block) or {}), **probabilistic}

    def cell(name: str, temperature: float) -> str:
        config = RECOMMENDED if name == MARS else lossless if temperature else METHODS[STANDARD]
        length = num_speculative_tokens or LENGTHS[temperature][name]
        options = {"num_speculative_tokens": length, "temperature": temperature}
        return f"{name}={json.dumps({**(config or {}), **options})}"

    cells = tuple(cell(name, temperature) for temperature in LENGTHS for name in (STRICT, MARS))
    return SweepOptions(
        model=model,
        methods=(),
        cells=cells,
        drafts=(draft,),
        baseline=STRICT,
        prompts=(prompts or str(PACKAGED),),
        categories=() if prompts else CATEGORIES,
        num_prompts=SHORT_PROMPTS if short else PROMPTS,
        max_tokens=SHORT_MAX_TOKENS if short else MAX_TOKENS,
        block=BLOCK,
        examples=True,
        side_by_side=0 if on_cpu else len(cells),
        **options,
    )
