"""`vllm-mars demo`: strict verification beside MARS, greedy and sampled, as a small sweep."""

import json
from pathlib import Path
from typing import Any

from vllm_mars.experiments import sweep_command
from vllm_mars.experiments.plan import METHODS, STANDARD, STRICT, SweepOptions
from vllm_mars.local.draft_head import PACKAGED_HEAD
from vllm_mars.local.drafts import NGRAM, RECOMMENDED, drafts_of
from vllm_mars.local.prompts import PACKAGED
from vllm_mars.local.provenance import vllm_device

NEEDED = sweep_command.NEEDED
OUTPUT, SHORT_OUTPUT = Path("build/demo.jsonl"), Path("build/demo-short.jsonl")
TEMPERATURE = 1.0
MARS, STRICT_DRAWN = "MARS", "strict, probabilistic"
# Draft tokens of strict verification, greedy and sampled, of that with probabilistic drafts, and of
# MARS: as fast as any for each, with an earlier head.
STRICT_LENGTHS, DRAWN_LENGTH, MARS_LENGTH = (3, 1), 2, 3
PROMPTS, MAX_TOKENS, BLOCK = 16, 48, 8
SHORT_PROMPTS, SHORT_MAX_TOKENS = 8, 24
EXAMPLES = 4


def add_parser(commands: Any) -> None:
    """Adds the command to `vllm-mars`."""
    parser = commands.add_parser(
        "demo",
        help="compare strict verification and MARS on real vLLM servers",
        description="Serves a model with vLLM's strict verification and with MARS at the "
        "recommended setting, asks each the same prompts in turn, greedy and at temperature 1 "
        "(there with probabilistic drafts, too), and compares speed and loss: a small sweep. "
        "By default it takes the packaged model with its EAGLE-3 head; another drafts with ngram.",
    )
    add = parser.add_argument
    add("--model", metavar="MODEL", help="default: the packaged model")
    add("--draft", metavar="DRAFT",
        help="ngram, suffix, mtp, or the directory or name of a draft model or head")  # fmt: skip
    add("--num-speculative-tokens", type=int, metavar="K",
        help="default 3, for strict verification of sampled requests 1")  # fmt: skip
    add("--prompts", metavar="FILE", help="JSON lines with 'prompt'; default 16 packaged ones")
    add("--short", action="store_true", help="8 prompts, 24 tokens: that it works, not how fast")
    add("--output", type=Path, metavar="FILE", help=f"default {OUTPUT}; logs go beside it")
    sweep_command.add_shared(add)


def run(short: bool, anew: bool, output: Path | None = None, **given: Any) -> int:
    """Runs the demo: measures what its file lacks, and prints the comparison."""
    from rich.console import Console

    from vllm_mars.demo.report import print_report
    from vllm_mars.experiments.sweep import run_sweep

    options = sweep_options(short=short, on_cpu=vllm_device()[0] == "cpu", **given)
    path = output or (SHORT_OUTPUT if short else OUTPUT)
    file = run_sweep(options, path, retry_failed=True, anew=anew)
    for record in file.records:
        if record.measured is None:
            raise RuntimeError(f"{record.name}: {record.reason}")
    print_report(file, Console())
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
    prompts: str = str(PACKAGED),
    **options: Any,
) -> SweepOptions:
    """The sweep of a demo.

    On a CPU vLLM's own server samples wrong tokens under speculation, so where requests sample
    strict verification is there MARS at price 0, which is the same.
    """
    draft = draft or (str(PACKAGED_HEAD) if model is None else NGRAM)
    strict: dict[str, Any] = METHODS[STRICT if on_cpu else STANDARD] or {}
    fixed, drawn = drafts_of(draft)
    greedy, sampled = STRICT_LENGTHS
    cells = [
        (STRICT, METHODS[STANDARD], greedy, 0.0),
        (MARS, RECOMMENDED, MARS_LENGTH, 0.0),
        (STRICT, {**strict, **fixed}, sampled, TEMPERATURE),
        (MARS, RECOMMENDED, MARS_LENGTH, TEMPERATURE),
    ]
    if drawn:
        cells.insert(3, (STRICT_DRAWN, {**strict, **drawn}, DRAWN_LENGTH, TEMPERATURE))

    def cell(name: str, config: Any, length: int, temperature: float) -> str:
        given = {"num_speculative_tokens": num_speculative_tokens or length}
        return f"{name}={json.dumps({**config, **given, 'temperature': temperature})}"

    return SweepOptions(
        model=model,
        methods=(),
        cells=tuple(cell(*of) for of in cells),
        drafts=(draft,),
        baseline=STRICT,
        prompts=(prompts,),
        num_prompts=SHORT_PROMPTS if short else PROMPTS,
        max_tokens=SHORT_MAX_TOKENS if short else MAX_TOKENS,
        block=BLOCK,
        examples=EXAMPLES,
        side_by_side=0 if on_cpu else len(cells),
        **options,
    )
