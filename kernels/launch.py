"""Launches whose compiled kernel is looked up, instead of being found by all arguments each time.

Triton binds the arguments of a launch, asks of each what a kernel may be compiled for, and finds
the compiled one by the answers, which takes the host several times as long as the launch. Of a step
of one engine nearly all answers are always the same: what a kernel gets lies where an allocation
begins, has one dtype, or is declared as not to be asked about. The rest is

- of the numbers, all that Triton asks about, read off the kernel's signature: looked at here;
- of the tensors and of functions, the few things that can differ between two steps: a
`launch_cache_for`
  names them.

What is switched on in Triton later, such as its instrumentation, does not reach kernels that were
launched before; hooks of profilers do. Triton's interpreter compiles nothing: it is called as ever.
"""

import functools
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any

import triton

# Whether each launch asks Triton, too, which must find the same kernel; for tests.
CHECKS = False

# The numbers of a launch, and by these what Triton has compiled.
_Compiled = tuple[Callable[[tuple[Any, ...]], Any], dict[Any, Any]]


class LaunchCache:
    """The kernels that were compiled for the tensors of some steps; made by `launch_cache_for`."""

    def __init__(self) -> None:
        self._kernels: dict[Callable[..., None], _Compiled] = {}

    def launch(self, kernel: Any, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        """Launches a kernel.

        Args:
            kernel: of `triton.jit`.
            grid: programs in each direction.
            args: all of its arguments, by place.
            options: such as `num_warps`; they may depend on its constants alone.
        """
        found = self._kernels.get(kernel.fn)
        compiled = None if found is None else found[1].get(found[0](args))
        if compiled is None:
            self._launch_first(kernel, grid, args, options)
            return
        if CHECKS:
            asked = kernel.run(*args, grid=grid, warmup=True, **options)
            assert asked is compiled, f"{kernel.fn.__name__} was compiled for other arguments"
        # As `kernel.run` has it. `compiled[grid](*args)` means the same, but takes twice as long.
        driver, hooks = triton.runtime.driver.active, triton.knobs.runtime
        stream = driver.get_current_stream(driver.get_current_device())
        enter, leave, metadata = hooks.launch_enter_hook, hooks.launch_exit_hook, None
        if enter.calls or leave.calls:
            metadata = compiled.launch_metadata(grid, stream, *args)
        else:
            enter = leave = None
        compiled.run(
            *(*grid, stream, compiled.function, compiled.packed_metadata, metadata, enter, leave),
            *args,
        )

    def _launch_first(
        self, kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], options: Any
    ) -> None:
        compiled = kernel[grid](*args, **options)
        if compiled is None:
            return
        if kernel.fn not in self._kernels:
            self._kernels[kernel.fn] = _numbers_of(kernel, args), {}
        numbers, by_numbers = self._kernels[kernel.fn]
        by_numbers[numbers(args)] = compiled


def _numbers_of(kernel: Any, args: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any]:
    """Gives, of the arguments of a launch, its constants and the integers that Triton looks at."""
    arg_indices = [
        param.num
        for param, value in zip(kernel.params, args, strict=True)
        if (param.is_constexpr or isinstance(value, int) and not param.do_not_specialize)
        # It takes as long to hash as all else.
        and not isinstance(value, triton.JITFunction)
    ]
    return itemgetter(*arg_indices) if arg_indices else lambda args: None


@functools.cache
def launch_cache_for(*of: Hashable) -> LaunchCache:
    """The one of steps whose tensors have this in common.

    Args:
        of: the rule, whose functions a step's kernels get; of their tensors the device, and what
            can differ between two steps: dtypes, whether they begin at 16 bytes, and whether they
            are there.
    """
    return LaunchCache()
