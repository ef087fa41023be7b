"""Compiles Triton kernels for GPUs that need not be present, and reads their resource use."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class Launch(NamedTuple):
    kernel: JITFunction
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def __getitem__(self, name: str) -> Any:
        """Value of an argument or launch option."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[self.kernel.arg_names.index(name)]


class Resources(NamedTuple):
    """Resources of a compiled kernel.

    Attributes:
        registers: registers per thread.
        spills: spilled bytes per thread; registers on AMD.
        wide_loads: 16-byte loads from global memory.
        fused: fused multiply-adds, which round once; always 0 on AMD.
    """

    registers: int
    spills: int
    wide_loads: int
    fused: int


def launches(call: Callable[[], Any]) -> list[Launch]:
    """Records the launches of a call on CPU tensors; no kernel runs."""
    recorded: list[Launch] = []

    def record(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: recorded.append(Launch(kernel, args, kwargs))

    with mock.patch.object(JITFunction, "__getitem__", record):
        call()
    return recorded


def compile_for(launch: Launch, target: str) -> Resources:
    """Compiles a launch for one of `TARGETS`; tensors only provide dtypes and alignment."""
    # Triton asks its driver for the target, and caches compiled kernels by device.
    driver = SimpleNamespace(
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGETS[target],
    )
    with mock.patch.object(triton.runtime.driver, "_active", driver):
        asm = launch.kernel.warmup(*launch.args, grid=(1,), **launch.kwargs).asm
    if "amdgcn" in asm:
        code = asm["amdgcn"]
        return Resources(
            registers=_number(r"\.vgpr_count:\s*(\d+)", code),
            spills=_number(r"\.vgpr_spill_count:\s*(\d+)", code),
            wide_loads=len(re.findall(r"(?:global|buffer)_load_dwordx4", code)),
            fused=0,
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Resources(
        registers=_number(r"REG:(\d+)", usage),
        # ptxas does not count its stack as LOCAL; only spilled registers are on it.
        spills=_number(r"STACK:(\d+)", usage),
        wide_loads=len(re.findall(r"LDG\.E(?:\.\w+)*\.128", asm["sass"])),
        fused=len(re.findall(r"\bfma\.rn", asm["ptx"])),
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match, f"the compiler's report has nothing that matches {pattern}"
    return int(match[1])
