"""Draws the answer to a prompt, with the loss in nats after each relaxed token.

    make demo && .venv/bin/python examples/first_steps.py "Why does the tide come in?"

It runs the packaged model, also on a CPU, and takes a minute. The picture is an SVG file for a
browser. Above the answer it shows the strict one.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# GiB, on a CPU.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from rich.console import Console
from rich.text import Text
from vllm import LLM, SamplingParams

from vllm_mars.lab.prompts import load_prompts
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.drafts import RECOMMENDED, speculative_config
from vllm_mars.models.packaged_model import ensure_model

PROMPT = next(prompt.turns[0] for prompt in load_prompts() if prompt.id == "rewrite-formal")


def main() -> None:
    """Answers a prompt strictly and with MARS; prints and draws both answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("prompt", nargs="?", default=PROMPT)
    add("--max-tokens", type=int, default=80)
    add("--output", type=Path, default=Path("build/first_steps.svg"), metavar="FILE")
    args = parser.parse_args()
    llm = LLM(
        str(ensure_model()),
        # EAGLE-3 drafts of 3 tokens, and "rejection_sample_method": "mars", "mars_max_loss": 0.02.
        speculative_config=speculative_config(str(PACKAGED_HEAD), 3, **RECOMMENDED),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
    )
    console = Console(record=True, width=100)
    console.print(Text(args.prompt, "italic"), "", sep="\n")
    # A request may always be stricter than its server; `mars_return` requests a report.
    for name, options in (("strict", {"mars_max_loss": 0}), ("MARS", {"mars_return": True})):
        params = SamplingParams(temperature=0, max_tokens=args.max_tokens, extra_args=options)
        messages = [{"role": "user", "content": args.prompt}]
        (request,) = llm.chat([messages], params, use_tqdm=False)
        (answer,) = request.outputs
        nats = {}
        if report := answer.spec_decode_metrics and answer.spec_decode_metrics.mars:
            nats = dict(zip(report["relaxed_positions"], report["loss_nats"], strict=True))
        text = Text()
        for position, token in enumerate(answer.token_ids):
            word = llm.get_tokenizer().decode([token], skip_special_tokens=True)
            text.append(word, "bold black on yellow" if position in nats else "")
            if position in nats:
                text.append(f" {nats[position]:.2f} ", "red")
        lost = f", {sum(nats.values()):.2f} nats lost by {len(nats)} relaxed tokens" if nats else ""
        console.print(Text(name + lost, "bold"), text, "", sep="\n")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(args.output), title="vllm-mars")
    console.print(f"The picture is {args.output}.")


if __name__ == "__main__":
    main()
