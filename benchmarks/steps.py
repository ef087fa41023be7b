"""Milliseconds of a whole decoding step of an engine, by what it verifies with.

    python -m benchmarks.steps --output steps.json
    python -m benchmarks.steps --output steps.json --models packaged 8b

Each engine has a process: without drafts, with vLLM's `standard` and `block`, with MARS, whose
requests are lossy, and with MARS that is strict unless a request asks, which none does. All start,
and then take turns, one alone at a time, in `--rounds` rounds: a batch of requests decodes
`--steps` steps behind some that are not timed, at each batch size and temperature. `8b` is
Llama-3.1-8B's shape with an EAGLE-3 head of its shape, both with dummy weights, so that hardly a
draft is accepted: its steps take what they take, its tokens say nothing. vLLM schedules
asynchronously where it can, so that the host works while the device does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import figures
from vllm_mars.lab.records import require_writable
from vllm_mars.models.draft_head import PACKAGED_HEAD
from vllm_mars.models.drafts import RECOMMENDED, speculative_config
from vllm_mars.models.packaged_model import ensure_model
from vllm_mars.options.config import METHOD
from vllm_mars.servers.provenance import describe_run, vllm_device
from vllm_mars.servers.vllm_args import CPU_ENGINE_ARGS, CPU_ENV

NONE = "no drafts"
STRICT = f"{METHOD}, strict"
MARS = {METHOD: RECOMMENDED, STRICT: RECOMMENDED | {"mars_max_loss": 0, "mars_limit": 0.02}}
ENGINES = NONE, "standard", "block", *MARS
MODELS = {"packaged": 4, "8b": 3}
PROMPT_LEN, WARM_UP = 64, 12
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128009,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
HEAD_8B = {
    **LLAMA_8B,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}


def written(directory: Path, config: dict[str, Any]) -> str:
    """A model that is its config alone."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def start(model: str, engine: str, batch: int, steps: int, folder: Path) -> Any:
    """An engine that has its graphs."""
    from vllm import LLM

    on_cpu = vllm_device()[0] == "cpu"
    own: dict[str, Any] = dict(CPU_ENGINE_ARGS) if on_cpu else {"dtype": "bfloat16"}
    # Compiled by Inductor nothing of this would be other, but the start.
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if not on_cpu:
        # What is free is compared with the share of one engine among all of them.
        own |= {"compilation_config": graphs, "gpu_memory_utilization": 0.15}
        own |= {"kv_cache_memory_bytes": 3 << 30}
    path, head = str(ensure_model()), str(PACKAGED_HEAD)
    if model == "8b":
        path, head = written(folder / "8b", LLAMA_8B), written(folder / "8b-eagle3", HEAD_8B)
        own |= {"load_format": "dummy", "skip_tokenizer_init": True}
    drafts: dict[str, Any] = {"draft_sample_method": "probabilistic"}
    drafts |= MARS.get(engine, {"rejection_sample_method": engine})
    if engine != NONE:
        own["speculative_config"] = {
            **speculative_config(head, MODELS[model], **drafts),
            "method": "eagle3",
        }
    most = PROMPT_LEN + (MODELS[model] + 1) * (steps + WARM_UP + 4)
    return LLM(
        path,
        max_model_len=max(256, most),
        max_num_seqs=batch,
        enable_prefix_caching=False,
        generation_config="vllm",
        disable_log_stats=True,
        **own,
    )


def step_time(llm: Any, batch: int, temperature: float, steps: int) -> tuple[float, float]:
    """Milliseconds of a step, and tokens per step of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    params = SamplingParams(
        temperature=temperature,
        seed=1 if temperature else None,
        max_tokens=engine.model_config.max_model_len - PROMPT_LEN,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    names = [f"{time.monotonic_ns()}-{at}" for at in range(batch)]
    for at, name in enumerate(names):
        ids = [(at * 31 + place * 7) % 997 + 3 for place in range(PROMPT_LEN)]
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    begun: set[str] = set()
    while len(begun) < batch:
        begun.update(output.request_id for output in engine.step())
    for _ in range(WARM_UP):
        engine.step()
    tokens, begin = 0, time.perf_counter()
    for _ in range(steps):
        tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
    elapsed = time.perf_counter() - begin
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return 1e3 * elapsed / steps, tokens / steps / batch


def serve(args: argparse.Namespace) -> None:
    """A process with an engine: a line for each point that is asked for."""
    # What vLLM prints goes elsewhere.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model, engine = args.serve
    llm = start(model, engine, max(args.batch), args.steps, args.folder)
    print("ready", file=answers)
    for line in sys.stdin:
        batch, temperature = json.loads(line)
        print(json.dumps(step_time(llm, batch, temperature, args.steps)), file=answers)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The medians of all rounds: rows by model, batch and temperature, columns by engine."""
    on_cpu = vllm_device()[0] == "cpu"
    # A process of its own for the engine core, but on a CPU, where it would take a core.
    environment = {**os.environ, **(CPU_ENV if on_cpu else {})}
    begin, options = time.monotonic(), sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for model in args.models:
            for engine in args.engines:
                command = [sys.executable, "-m", "benchmarks.steps", *options, "--folder", folder]
                children[model, engine] = subprocess.Popen(
                    [*command, "--serve", model, engine],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
                # Engines that look at a GPU's free memory at once count each other's.
                time.sleep(0 if on_cpu else 4)
        points = [(batch, heat) for batch in args.batch for heat in args.temperatures]
        found: dict[tuple[str, int, float, str], list[list[float]]] = {}
        ready = {}
        for name, child in children.items():
            assert child.stdin is not None and child.stdout is not None, "given PIPE"
            if child.stdout.readline() != "ready\n":
                print(f"{name} did not start", file=sys.stderr, flush=True)
                continue
            ready[name] = child.stdin, child.stdout
        print(f"{len(ready)} engines after {time.monotonic() - begin:.0f} s", file=sys.stderr)
        for number in range(args.rounds):
            for (model, engine), (asks, answers) in ready.items():
                for batch, heat in points:
                    print(json.dumps([batch, heat]), file=asks, flush=True)
                    answer = json.loads(answers.readline())
                    found.setdefault((model, batch, heat, engine), []).append(answer)
            print(f"round {number} after {time.monotonic() - begin:.0f} s", file=sys.stderr)
        for child in children.values():
            child.terminate()
            child.wait()
    columns: list[list[str | None]] = [["model, requests, temperature", ""]]
    columns += [[engine, ".2f"] for engine in args.engines]
    columns += [["tokens per step of MARS", ".2f"]]
    rows = []
    for model in args.models:
        for batch, heat in points:
            each = [found.get((model, batch, heat, engine)) for engine in args.engines]
            times = [of and statistics.median(ms for ms, _ in of) for of in each]
            mars = found.get((model, batch, heat, METHOD))
            tokens = mars and statistics.median(tokens for _, tokens in mars)
            rows.append([f"{model}, {batch}, {heat:g}", *times, tokens])
    raw = [[*name, *of] for name, of in found.items()]
    return {"columns": columns, "rows": rows, "raw": raw}


def main() -> int:
    """Measures, and writes the figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--models", nargs="+", choices=MODELS, default=["packaged"])
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    add("--batch", nargs="+", type=int, default=[1, 8, 64])
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    add("--steps", type=int, default=40)
    add("--rounds", type=int, default=9)
    add("--serve", nargs=2, help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return 0
    require_writable(args.output)
    found = measure(args)
    run = {**describe_run(vllm_device()[1]), "raw": "this file"}
    figures.write(args.output, {**found, "runs": [run]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
