"""Caches compiled kernels, so that a launch skips specializing its arguments.

Specialization takes several times as long on the host as the launch, but in one engine most of its
results never change. Kernels are looked up by the rest: by constants and specialized integers here,
by tensor properties in `launch_cache_for`. Profiler hooks work as usual; other Triton settings that
change later, such as instrumentation, do not reach cached kernels.
"""

import functools
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any, NamedTuple

import triton

# For `triton.jit`, which ignores names that a kernel lacks. vLLM passes views at any offset, and
# these integers change between steps: specializing on them would only multiply the variants.
UNALIGNED = [
    "clipped_ptr", "cu_num_logits_ptr", "expanded_idx_mapping_ptr", "expanded_local_pos_ptr",
    "input_ids_ptr", "markers_ptr", "masses_ptr", "output_token_ids_ptr", "pos_ptr",
    "prompt_len_ptr", "ring_ptr", "seen_ptr", "slots_ptr", "table_ptr", "temperature_ptr",
    "tokens_ptr", "total_len_ptr",
]  # fmt: skip
UNSPECIALIZED = [
    "blocks_per_split", "columns", "ids_stride", "logprobs_stride", "num_blocks", "num_markers",
    "num_rows", "num_speculative_tokens", "num_splits", "num_words", "opening", "tokens_stride",
]  # fmt: skip

# Whether each launch compares the cached kernel with the one that Triton selects; for tests.
CHECKS = False


class _Compiled(NamedTuple):
    """Compiled versions of one kernel by the arguments that `key_of` selects."""

    key_of: Callable[[tuple[Any, ...]], Any]
    by_key: dict[Any, Any]


class LaunchCache:
    """Compiled kernels of steps with equal tensor properties; made by `launch_cache_for`."""

    def __init__(self) -> None:
        self._kernels: dict[Callable[..., None], _Compiled] = {}

    def launch(self, kernel: Any, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        """Launches a jitted kernel; compile options may depend only on the kernel's constants."""
        versions = self._kernels.get(kernel.fn)
        compiled = None if versions is None else versions.by_key.get(versions.key_of(args))
        if compiled is None:
            self._launch_first(kernel, grid, args, options)
            return
        if CHECKS:
            selected = kernel.run(*args, grid=grid, warmup=True, **options)
            assert selected is compiled, f"{kernel.fn.__name__} was compiled for other arguments"
        # The end of `kernel.run`. `compiled[grid](*args)` does the same in twice the time.
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        enter_hook = triton.knobs.runtime.launch_enter_hook
        exit_hook = triton.knobs.runtime.launch_exit_hook
        metadata = None
        if enter_hook.calls or exit_hook.calls:
            metadata = compiled.launch_metadata(grid, stream, *args)
        else:
            enter_hook = exit_hook = None
        compiled.run(
            *grid,
            stream,
            compiled.function,
            compiled.packed_metadata,
            metadata,
            enter_hook,
            exit_hook,
            *args,
        )

    def _launch_first(
        self, kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], options: Any
    ) -> None:
        compiled = kernel[grid](*args, **options)
        if compiled is None:
            # Triton's interpreter compiles nothing.
            return
        if kernel.fn not in self._kernels:
            self._kernels[kernel.fn] = _Compiled(key_of=_key_getter(kernel, args), by_key={})
        versions = self._kernels[kernel.fn]
        versions.by_key[versions.key_of(args)] = compiled


def _key_getter(kernel: Any, args: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any]:
    """Returns a getter of a launch's constants and of the integers that Triton specializes."""
    arg_indices = [
        param.num
        for param, value in zip(kernel.params, args, strict=True)
        if (param.is_constexpr or isinstance(value, int) and not param.do_not_specialize)
        # Hashing a function takes as long as all else; the rule is in `launch_cache_for`'s key.
        and not isinstance(value, triton.JITFunction)
    ]
    return itemgetter(*arg_indices) if arg_indices else lambda args: None


@functools.cache
def launch_cache_for(*properties: Hashable) -> LaunchCache:
    # Callers pass the rule, whose functions are kernel arguments, the device, and all that varies
    # between steps: tensor dtypes, 16-byte alignment, and which optional tensors are None.
    return LaunchCache()
