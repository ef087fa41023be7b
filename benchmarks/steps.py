"""Times whole decoding steps of engines with different verification, in milliseconds.

    python -m benchmarks.steps --output steps.json
    python -m benchmarks.steps --output steps.json --models packaged 8b

Each engine has a process: without drafts, vLLM's `standard` and `block`, MARS with lossy requests,
and MARS with strict requests on a server that is strict by default. After all have started, they
take turns, one at a time, in `--rounds` rounds: a batch of requests decodes some warm-up steps and
then `--steps` timed ones, at each batch size and temperature. `8b` has the shape of Llama-3.1-8B
and an EAGLE-3 head, with dummy weights, so that hardly any draft is accepted: only its times have a
meaning. vLLM schedules asynchronously if it can, so the host works in parallel with the device.
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
    """Writes a model directory with only a config."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def start(model: str, engine: str, batch: int, steps: int, folder: Path) -> Any:
    """Starts an engine and captures its graphs."""
    from vllm import LLM

    on_cpu = vllm_device()[0] == "cpu"
    engine_args: dict[str, Any] = dict(CPU_ENGINE_ARGS) if on_cpu else {"dtype": "bfloat16"}
    # Inductor would only make the start slower.
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if not on_cpu:
        engine_args |= {
            "compilation_config": graphs,
            # vLLM requires this share to be free, while all engines share the GPU.
            "gpu_memory_utilization": 0.15,
            "kv_cache_memory_bytes": 3 << 30,
        }
    path = str(ensure_model())
    head = str(PACKAGED_HEAD)
    if model == "8b":
        path = written(folder / "8b", LLAMA_8B)
        head = written(folder / "8b-eagle3", HEAD_8B)
        engine_args |= {"load_format": "dummy", "skip_tokenizer_init": True}
    drafts: dict[str, Any] = {"draft_sample_method": "probabilistic"}
    drafts |= MARS.get(engine, {"rejection_sample_method": engine})
    if engine != NONE:
        engine_args["speculative_config"] = {
            **speculative_config(head, MODELS[model], **drafts),
            "method": "eagle3",
        }
    max_len = PROMPT_LEN + (MODELS[model] + 1) * (steps + WARM_UP + 4)
    return LLM(
        path,
        max_model_len=max(256, max_len),
        max_num_seqs=batch,
        enable_prefix_caching=False,
        generation_config="vllm",
        disable_log_stats=True,
        **engine_args,
    )


def step_time(llm: Any, batch: int, temperature: float, steps: int) -> tuple[float, float]:
    """Returns milliseconds per step, and tokens per step of a request."""
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
    names = [f"{time.monotonic_ns()}-{number}" for number in range(batch)]
    for number, name in enumerate(names):
        ids = [(number * 31 + position * 7) % 997 + 3 for position in range(PROMPT_LEN)]
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    started: set[str] = set()
    while len(started) < batch:
        started.update(output.request_id for output in engine.step())
    for _ in range(WARM_UP):
        engine.step()
    tokens = 0
    begin = time.perf_counter()
    for _ in range(steps):
        tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
    elapsed = time.perf_counter() - begin
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return 1e3 * elapsed / steps, tokens / steps / batch


def serve(args: argparse.Namespace) -> None:
    """Runs an engine in a child process, which answers each point with a line of JSON."""
    # Standard output is for answers; vLLM's goes to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model, engine = args.serve
    llm = start(model, engine, max(args.batch), args.steps, args.folder)
    print("ready", file=answers)
    for line in sys.stdin:
        batch, temperature = json.loads(line)
        print(json.dumps(step_time(llm, batch, temperature, args.steps)), file=answers)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns medians over rounds, with a row per point and a column per engine."""
    on_cpu = vllm_device()[0] == "cpu"
    # CPU_ENV keeps the engine core in the process, where a second one would take a core.
    environment = {**os.environ, **(CPU_ENV if on_cpu else {})}
    begin = time.monotonic()
    options = sys.argv[1:]
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
                # Engines that profile a GPU's free memory at once would count each other's.
                time.sleep(0 if on_cpu else 4)
        points = [(batch, t) for batch in args.batch for t in args.temperatures]
        samples: dict[tuple[str, int, float, str], list[list[float]]] = {}
        ready = {}
        for name, child in children.items():
            assert child.stdin is not None and child.stdout is not None, "given PIPE"
            if child.stdout.readline() != "ready\n":
                print(f"{name} did not start", file=sys.stderr, flush=True)
                continue
            ready[name] = child.stdin, child.stdout
        print(f"{len(ready)} engines after {time.monotonic() - begin:.0f} s", file=sys.stderr)
        for number in range(args.rounds):
            for (model, engine), (stdin, stdout) in ready.items():
                for batch, t in points:
                    print(json.dumps([batch, t]), file=stdin, flush=True)
                    sample = json.loads(stdout.readline())
                    samples.setdefault((model, batch, t, engine), []).append(sample)
            print(f"round {number} after {time.monotonic() - begin:.0f} s", file=sys.stderr)
        for child in children.values():
            child.terminate()
            child.wait()
    columns: list[list[str | None]] = [["model, requests, temperature", ""]]
    columns += [[engine, ".2f"] for engine in args.engines]
    columns += [["tokens per step of MARS", ".2f"]]
    rows = []
    for model in args.models:
        for batch, t in points:
            by_engine = [samples.get((model, batch, t, engine)) for engine in args.engines]
            times = [run and statistics.median(ms for ms, _ in run) for run in by_engine]
            mars = samples.get((model, batch, t, METHOD))
            tokens = mars and statistics.median(tokens for _, tokens in mars)
            rows.append([f"{model}, {batch}, {t:g}", *times, tokens])
    raw = [[*point, *run] for point, run in samples.items()]
    return {"columns": columns, "rows": rows, "raw": raw}


def main() -> int:
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
    content = measure(args)
    run = {**describe_run(vllm_device()[1]), "raw": "this file"}
    figures.write(args.output, {**content, "runs": [run]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
