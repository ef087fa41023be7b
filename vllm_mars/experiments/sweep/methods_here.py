"""What the installed vLLM can verify here, asked in a child process that imports it."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_mars.experiments.sweep.plan import ServerSpec
from vllm_mars.local.provenance import ask_vllm

V2_LINE = "Using V2 Model Runner"

_ASK = """
import json, typing
from vllm_mars.vllm_cli import answer_for_vllm_cpu
answer_for_vllm_cpu()
from vllm.config import speculative
from vllm.platforms import current_platform as platform
import vllm
cpu = platform.device_type == "cpu"
print(json.dumps({
    "device": platform.device_type,
    "gpu": None if cpu else platform.get_device_name(),
    "vllm": vllm.__version__,
    "methods": typing.get_args(speculative.RejectionSampleMethod),
}))
"""


@dataclass(frozen=True)
class Platform:
    """The platform that vLLM takes, such as "cpu", its version and rejection sample methods."""

    device: str
    gpu: str | None
    vllm: str
    methods: Sequence[str]

    def why_not(self, spec: ServerSpec, temperature: float = 0.0) -> str | None:
        """Why this server would not verify as it should, as far as is known before it starts."""
        if spec.method in ("autoregressive", "mars"):
            return None
        if spec.method not in self.methods:
            return (
                f"vLLM {self.vllm} has no rejection_sample_method {spec.method!r} (it has "
                f"{', '.join(self.methods)})."
            )
        if self.device == "cpu" and spec.method == "fly":
            return "vLLM has no 'fly' on a CPU."
        if self.device == "cpu" and spec.method == "block":
            return _V1
        return _CPU_KERNELS if self.device == "cpu" and temperature > 0 else None

    def why_not_in_log(self, spec: ServerSpec, log: str) -> str | None:
        """The same for a server that runs, by its log."""
        return _V1 if spec.method == "block" and V2_LINE not in log else None


_CPU_KERNELS = (
    "vLLM's CPU kernels give wrong tokens to sampled requests under speculation, and only a server "
    "that asks for MARS replaces them (vllm_mars/runner/cpu_kernels.py); compare with theta 1, "
    "which verifies as 'standard'."
)
_V1 = (
    "vLLM verifies blocks only in its V2 model runner; this server has V1, which accepts 'block' "
    "and verifies as 'standard'."
)


def ask_platform() -> Platform:
    """Asks vLLM in a child process, which takes some seconds.

    Raises:
        RuntimeError: vLLM is not installed or cannot be imported.
    """
    return Platform(**ask_vllm(_ASK))
