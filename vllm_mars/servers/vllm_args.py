"""How servers and engines are told to run vLLM, wherever this project starts one."""

from typing import Any

MAX_MODEL_LEN = 2048
# Each request pays for its own prefill, so that repeats measure the same as the first pass, and
# samples as it says, whatever the model's generation_config.json holds.
SERVER_ARGS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"),
    *("--generation-config", "vllm"),
)
# The share of a GPU's memory that all servers on it have.
GPU_MEMORY = 0.9
# Without AVX-512 float32 is faster than bfloat16 on a CPU; compiling would take minutes.
CPU_ENGINE_ARGS: dict[str, Any] = {"enforce_eager": True, "dtype": "float32"}
# The same for the command line.
CPU_ARGS = ("--enforce-eager", "--dtype", "float32")
CPU_ENV = {
    # GiB.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The worker shares the engine core's process, unless there are several: a third fewer imports
    # of vLLM at the start. `vllm serve` keeps the engine core in a process of its own.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Even an eager engine compiles a function of two lines for the first logprobs, in 12 seconds.
    "TORCH_COMPILE_DISABLE": "1",
}
# After its last step vLLM 0.32 polls shared memory for a second before it sleeps, which slows
# another server on the same cores.
SETTLE_SECONDS = 1.5


def server_args(on_cpu: bool, servers: int = 1) -> list[str]:
    """Arguments of one of so many servers that run side by side."""
    share = ("--gpu-memory-utilization", f"{GPU_MEMORY / servers:.2f}")
    return [*SERVER_ARGS, *(CPU_ARGS if on_cpu else share)]
