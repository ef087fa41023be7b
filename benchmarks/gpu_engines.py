"""One real engine in this process, which takes turns with others. Appends JSON lines."""
import argparse, json, os, sys, time
p = argparse.ArgumentParser()
p.add_argument("--name"); p.add_argument("--all", nargs="+"); p.add_argument("--turn"); p.add_argument("--out")
p.add_argument("--model"); p.add_argument("--head"); p.add_argument("--k", type=int, default=4)
p.add_argument("--tokens", type=int, default=192); p.add_argument("--rounds", type=int, default=3); p.add_argument("--ones", type=int, default=6)
p.add_argument("--util", type=float, default=0.15)
a = p.parse_args()
for k, v in dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1").items(): os.environ.setdefault(k, v)
begin = time.perf_counter()
from vllm import LLM, SamplingParams
import torch, vllm_mars
method, cuda, spec = a.name.split("-")[0], torch.cuda.is_available(), None
if method != "none":
    spec = {"method": "eagle3", "model": a.head, "num_speculative_tokens": a.k, "draft_sample_method": "probabilistic"}
    if method == "mars": spec |= {"rejection_sample_method": "mars", "mars_max_loss": 0.02}
options = dict(model=a.model, max_model_len=1024, max_num_seqs=32, seed=0, enable_prefix_caching=False, speculative_config=spec, disable_log_stats=False)
options |= dict(dtype="bfloat16", gpu_memory_utilization=a.util, compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "max_cudagraph_capture_size": 32 * (a.k + 1)}) if cuda else dict(dtype="float32", enforce_eager=True)
llm = LLM(**options)
loaded = time.perf_counter() - begin
print("LOADED", a.name, loaded, flush=True)
prompts = [json.loads(line)["prompt"] for line in open(os.path.join(os.path.dirname(vllm_mars.__file__), "local/prompts.jsonl"))]
def counters():
    found = {}
    for m in llm.get_metrics():
        if hasattr(m, "value") and ("spec_decode" in m.name or "mars" in m.name): found[m.name] = found.get(m.name, 0) + m.value
    return found
def generate(texts, temperature, args, seed):
    params = [SamplingParams(temperature=temperature, max_tokens=a.tokens, seed=seed + i, extra_args=args) for i in range(len(texts))]
    return llm.chat([[{"role": "user", "content": t}] for t in texts], params, use_tqdm=False)
def run(round_):
    for temperature in (0.0, 1.0):
        for batch in (1, 32):
            for args in ([None, {"mars_price": 0}] if method == "mars" else [None]):
                before, t = counters(), time.perf_counter()
                groups = [[q] for q in prompts[round_ * a.ones % 32:][:a.ones]] if batch == 1 else [prompts]
                outs = [o for i, g in enumerate(groups) for o in generate(g, temperature, args, 1000 + 100 * i + 7919 * round_)]
                took = time.perf_counter() - t
                after = {k: v - before.get(k, 0) for k, v in counters().items()}
                d = after.get("vllm:spec_decode_num_drafts", 0)
                ids = [list(o.outputs[0].token_ids) for o in outs]
                total = sum(map(len, ids))
                row = dict(name=a.name + ("" if args is None else ", price 0"), k=a.k, temperature=temperature, batch=batch, round=round_, seconds=took, tokens=total,
                           tok_per_s=total / took, tokens_per_step=1 + after.get("vllm:spec_decode_num_accepted_tokens", 0) / d if d else 1, counters=after, loaded_s=loaded, ids=ids)
                with open(a.out, "a") as f: print(json.dumps(row), file=f, flush=True)
                print({k: v for k, v in row.items() if k not in ("ids", "counters")}, flush=True)
    if round_ >= 0: print("text:", outs[0].outputs[0].text[:200], flush=True)
open(f"{a.turn}/ready-{a.name}", "w").close()
while not all(os.path.exists(f"{a.turn}/ready-{n}") for n in a.all): time.sleep(0.05)
order = [(r, n) for r in range(a.rounds) for n in (a.all if r % 2 == 0 else a.all[::-1])]
for i, (r, n) in enumerate(order):
    if n == a.name:
        while i and not os.path.exists(f"{a.turn}/done-{i - 1}"): time.sleep(0.02)
        if r == 0: generate(prompts, 1.0, None, 5); generate(prompts[:1], 0.0, None, 5)
        run(r)
        open(f"{a.turn}/done-{i}", "w").close()
sys.stdout.flush(); os._exit(0)
