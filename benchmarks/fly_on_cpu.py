"""vLLM 0.33's `fly` on an engine on a CPU, greedily, beside strict verification and bounds.

    python -m benchmarks.fly_on_cpu build/fly.jsonl --rules strict mars_max_loss=0.02
    python -m benchmarks.fly_on_cpu build/fly.jsonl --rules fly
    python -m benchmarks.fly_on_cpu build/fly.jsonl --rules fly-1 [or fly-2: the window]
    python -m benchmarks.fly_on_cpu build/fly.jsonl --figures

`benchmarks.text` asks. vLLM's path is its own, but for the Triton kernel, which is torch here, and
its refusal of a CPU. Nats lost are log p of the target's first choice less log p of each token, by
transformers, so they are the same for all rules.
"""

import sys
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks import text
from benchmarks.figures import RESULTS, SCHEMA, table_of
from vllm_mars.experiments.rows import Interval, compared, estimate, ratio_of_means
from vllm_mars.local.result_file import write_json

OWN = {"fly": {}, "fly-1": {"fly_window_size": 1}, "fly-2": {"fly_window_size": 2}}
NAMES = {
    "fly": "`fly`, its defaults (window 3)",
    "fly-2": "`fly`, window 2",
    "fly-1": "`fly`, window 1",
}
TEXTS = Path(__file__).with_name("texts.jsonl")


class Prepass:
    """`apply_fly_greedy_acceptance_kernel` of vLLM 0.33, v1/spec_decode/fly.py, in torch."""

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(
        self, cu: Any, ids: Any, argmax: Any, logits: Any, entropy: Any, *rest: Any, **of: Any
    ) -> None:
        (_, vocab, threshold), window, begin = rest, of["FLY_WINDOW_SIZE"], 0
        native = ids == argmax
        for end in cu.tolist():
            for i in range(begin, end - window):
                x = int(ids[i])
                if native[i] or not 0 <= x < vocab or entropy[i] < threshold:
                    continue
                if logits[i, x] > -torch.inf and native[i + 1 : i + 1 + window].all():
                    argmax[i] = x
            begin = end


def measure(arguments: list[str]) -> None:
    from vllm.v1.sample import rejection_sampler as own

    known: list[dict[str, Any]] = []
    init, told = own.RejectionSampler.__init__, text.told

    def score(model: Any, texts: Any, temperature: float, most: int) -> list[list[float]]:
        for prompt, answer in texts:
            with torch.inference_mode():
                rows = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            log_p = rows.float().log_softmax(-1)
            nll = -log_p.gather(1, torch.tensor(answer)[:, None])[:, 0]
            given, entropy = nll + log_p.amax(-1), -(log_p.exp() * log_p).sum(-1)
            sums = {"nll": nll, "given": given, "entropy": entropy}
            known.append({name: float(it.sum()) for name, it in sums.items()})
            known[-1]["crc"] = zlib.crc32(np.array(answer).tobytes())
        return [[it["nll"], it["entropy"]] for it in known]

    # vLLM reads the device for another method alone.
    def without_device(self: Any, sampler: Any, spec: Any = None, device: Any = None) -> None:
        init(self, sampler, spec, None)

    with (
        mock.patch.object(own, "apply_fly_greedy_acceptance_kernel", Prepass()),
        mock.patch.object(own.RejectionSampler, "__init__", without_device),
        mock.patch.object(text, "score", score),
        mock.patch.object(text, "told", lambda it: told(it) | known.pop(0)),
    ):
        text.main(arguments)


def figures(path: Path) -> None:
    calls = [it for it in text.read(path) if "run" not in it]
    runs = [it["run"] | {"raw": "text/fly.jsonl.gz"} for it in text.read(path) if "run" in it]
    by_rule: dict[str, Any] = {}
    for call in calls:
        by_rule.setdefault(call["name"], []).append(call)
    of: Any = {name: text.samples(own) for name, own in by_rule.items()}
    strict, rows = of["strict"], []
    steps = ["further", "steps"]
    for name, own in of.items():
        for prompt, it in own.items():
            it["same"] = 100.0 * (it["crc"] == strict[prompt]["crc"])
        base = strict if name != "strict" else {}
        ratio = compared(ratio_of_means, own, base, steps)
        nll = compared(ratio_of_means, own, base, ["nll", "tokens"], np.subtract)
        row = [
            NAMES.get(name.partition(",")[0], name),
            len(own),
            estimate(ratio_of_means, own, steps),
            ratio,
        ]
        row += [estimate(ratio_of_means, own, ["given", "tokens"]), nll]
        row += [estimate(ratio_of_means, own, ["same", "one"]) if base else None]
        row += [estimate(ratio_of_means, own, ["repeated", "grams"])]
        rows.append([text.cell(it) if isinstance(it, Interval) else it for it in row])
    columns = [["rule", ""], ["prompts", "d"], ["tokens per step", ".2f"]]
    columns += [["tokens per step x strict", ".3f"], ["nats lost per token", ".4f"]]
    columns += [
        ["NLL less strict's", "+.3f"],
        ["same answers, %", ".0f"],
        ["repeated 4-grams", ".3f"],
    ]
    print("\n".join(table_of(columns, rows)))
    content = {"schema": SCHEMA, "columns": columns, "rows": rows, "runs": runs}
    write_json(RESULTS / "fly.json", content)


if __name__ == "__main__":
    output, action, *rules = sys.argv[1:]
    if action == "--figures":
        figures(Path(output))
    else:
        text.SERVERS |= {
            name: {"rejection_sample_method": "fly", **own} for name, own in OWN.items()
        }
        text.KEPT = (*text.KEPT, "given", "crc")  # type: ignore[assignment]
        # Greedily the drafts are the same, and nothing draws.
        fixed = ["--fixed-drafts"] if rules[0] in OWN else []
        asked = ["--prompts", str(TEXTS), "--block", "28", "--temperatures", "0"]
        measure(["--output", output, *asked, "--rules", *rules, *fixed])
