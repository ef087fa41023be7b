"""Runs Triton without a GPU, to count launches or to time their host side.

`without_compiling` only records launches, for `launches` and for tests. `without_a_driver` compiles
kernels for an absent GPU, binds arguments and calls Triton's C launcher on a stub of the driver, so
that times lack only the driver's part of a launch.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
NO_COMPILER = (
    "benchmarks.launches needs a C compiler to build Triton's launcher, and gcc was not found; "
    "install it, or name another one in the environment variable CC."
)
# Device addresses are host addresses, and any kernel fits.
_LIBCUDA = """
#include <stdint.h>
#define DOES_NOTHING(name) int name(void) { return 0; }
DOES_NOTHING(cuCtxSetCurrent) DOES_NOTHING(cuCtxSetLimit) DOES_NOTHING(cuDriverGetVersion)
DOES_NOTHING(cuFuncSetAttribute) DOES_NOTHING(cuFuncSetCacheConfig) DOES_NOTHING(cuInit)
DOES_NOTHING(cuLaunchKernelEx) DOES_NOTHING(cuModuleUnload) DOES_NOTHING(cuPointerGetAttributes)
DOES_NOTHING(cuOccupancyMaxActiveClusters) DOES_NOTHING(cuStreamIsCapturing)
DOES_NOTHING(cuTensorMapEncodeTiled) DOES_NOTHING(cuTensorMapEncodeIm2col)
static int something;
int cuGetErrorString(int error, const char **text) { *text = "a driver without a GPU"; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGetAttribute(int *value, int name, int device) { *value = 1 << 16; return 0; }
int cuFuncGetAttribute(int *value, int name, void *kernel) { *value = name ? 0 : 1024; return 0; }
int cuCtxGetCurrent(void **context) { *context = &something; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(uint64_t *value, int limit) { *value = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &something; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = &something; return 0; }
int cuModuleGetFunction(void **kernel, void *module, const char *name) {
  *kernel = &something;
  return 0;
}
int cuPointerGetAttribute(uint64_t *value, int name, uint64_t address) {
  *value = address;
  return 0;
}
"""


class Uncompiled:
    """Stub of a compiled kernel."""

    function, packed_metadata = 0, ()

    def __init__(self, launched: Callable[[tuple[Any, ...]], object]) -> None:
        self._launched = launched

    def run(self, *args: Any) -> None:
        """Called by Triton to launch a kernel; the grid, stream and more precede its arguments."""
        self._launched(args)

    def launch_metadata(self, *_: Any) -> None:
        """Called by Triton for the hooks of profilers."""


@contextlib.contextmanager
def without_compiling(
    launched: Callable[[str, tuple[Any, ...]], object],
) -> Iterator[list[tuple[str, str]]]:
    """Makes Triton specialize arguments without compiling or launching kernels.

    Each cached launch is also checked against Triton's own lookup.

    Args:
        launched: receives the name of each launched kernel and the arguments of `Uncompiled.run`.

    Yields:
        Name and key of each kernel that Triton would have compiled.
    """
    from vllm_mars.kernels import launch

    # Key of Triton's and `launch`'s caches of compiled kernels.
    device = object()
    compiled = []

    def compile_nothing(kernel: Any, key: str, *_: Any, **__: Any) -> Any:
        name = kernel.fn.__name__
        compiled.append((name, key))
        stub = Uncompiled(lambda args: launched(name, args))
        kernel.device_caches[device][0][key] = stub
        return stub

    driver = SimpleNamespace(
        get_current_device=lambda: device,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGET,
    )
    launch.launch_cache_for.cache_clear()
    try:
        with (
            mock.patch.object(triton.runtime.driver, "_active", driver),
            mock.patch.object(JITFunction, "_do_compile", compile_nothing),
            mock.patch.object(launch, "CHECKS", True),
        ):
            yield compiled
    finally:
        launch.launch_cache_for.cache_clear()


def has_compiler() -> bool:
    return shutil.which(os.environ.get("CC", "gcc")) is not None


@contextlib.contextmanager
def without_a_driver() -> Iterator[None]:
    """Makes Triton launch kernels for `TARGET` on CPU tensors; usable once per process."""
    from triton.backends.nvidia import driver as nvidia

    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libcuda.so.1")
        command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
        subprocess.run(
            [*command, "-x", "c", "-o", library, "-"], input=_LIBCUDA, text=True, check=True
        )
        # Loaded globally, so that dlopen finds it by name.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        with mock.patch.dict(os.environ, TRITON_LIBCUDA_PATH=folder):
            driver = SimpleNamespace(
                get_current_device=lambda: 0,
                get_current_stream=lambda device: 0,
                get_current_target=lambda: TARGET,
                launcher_cls=nvidia.CudaLauncher,
            )
            with mock.patch.object(triton.runtime.driver, "_active", driver):
                driver.utils = nvidia.CudaUtils()
                yield
