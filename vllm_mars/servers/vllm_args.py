"""Arguments of the vLLM servers and engines that this project starts."""

from typing import Any

MAX_MODEL_LEN = 2048
# Without prefix caching repeats measure the same as the first pass. The model's
# generation_config.json must not change sampling parameters.
SERVER_ARGS = (
    "--max-model-len",
    str(MAX_MODEL_LEN),
    "--no-enable-prefix-caching",
    "--generation-config",
    "vllm",
)
# Share of a GPU's memory for all servers on it.
GPU_MEMORY = 0.9
# Without AVX-512 float32 is faster than bfloat16 on a CPU; compiling would take minutes.
CPU_ENGINE_ARGS: dict[str, Any] = {"enforce_eager": True, "dtype": "float32"}
# CPU_ENGINE_ARGS on the command line.
CPU_ARGS = ("--enforce-eager", "--dtype", "float32")
CPU_ENV = {
    # GiB.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # A single worker shares the engine core's process, which saves a third of the imports of vLLM.
    # `vllm serve` still runs the engine core in a separate process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Even an eager engine compiles a small function for the first logprobs, which takes 12 s.
    "TORCH_COMPILE_DISABLE": "1",
}
# After its last step vLLM 0.32 polls shared memory for a second, which slows other servers on the
# same cores.
SETTLE_SECONDS = 1.5


def server_args(on_cpu: bool, servers: int) -> list[str]:
    """Returns the arguments of one of `servers` that run at the same time."""
    share = ("--gpu-memory-utilization", f"{GPU_MEMORY / servers:.2f}")
    return [*SERVER_ARGS, *(CPU_ARGS if on_cpu else share)]
