"""What Triton's interpreter lacks for vLLM's kernels; each gap is an error, never a wrong number.

Written for Triton 3.9. A gap that a later one closes makes its part here superfluous, not wrong.
"""

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter


def fill() -> None:
    """Fills the gaps, in the process that calls it."""
    # The interpreter has none of the device library: its functions are empty and return None.
    libdevice.exp2, libdevice.log1p = _of_numpy(np.exp2), _of_numpy(np.log1p)
    interpreter._patch_lang_core = _with_tensor_range(interpreter._patch_lang_core)
    interpreter._patch_lang = _once(interpreter._patch_lang)
    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = _with_bool_mask(builder.create_masked_load, 2)
    builder.create_masked_store = _with_bool_mask(builder.create_masked_store, 3)


def _of_numpy(function):
    return lambda x: tl.tensor(interpreter.TensorHandle(function(x.handle.data), x.dtype), x.type)


def _with_tensor_range(patch_lang_core):
    """Makes `tl.range` count in tensors, as on hardware, so that `.to` is there."""

    def patched(lang, scope):
        patch_lang_core(lang, scope)
        numbers = lang.range

        def tensors(*args, **kwargs):
            return map(interpreter._implicit_cvt, numbers(*args, **kwargs))

        scope.set_attr(lang, "range", tensors)

    return patched


def _once(patch_lang):
    """Leaves the language as it is where the calling kernel has patched it already.

    For speed alone: the interpreter looks through the whole language at each call of a function
    inside a kernel, which is half the time that vLLM's kernels take.
    """
    patched = set()

    def patch_lang_once(fn):
        names = fn.__globals__.values()
        missing = {id(lang) for lang in (tl, tl.core) if any(lang is n for n in names)} - patched
        if not missing:
            return interpreter._LangPatchScope()
        scope = patch_lang(fn)
        patched.update(missing)
        restore = scope.restore

        def restore_and_forget():
            restore()
            patched.difference_update(missing)

        scope.restore = restore_and_forget
        return scope

    return patch_lang_once


def _with_bool_mask(access, position):
    """Makes a mask of another type `!= 0`, which is what hardware does.

    The interpreter labels a comparison's result with its operands' type. A scalar comparison that
    is spread over a block (`mask & is_valid`) then becomes a block of int64, and load and store
    refuse such a mask.
    """

    def with_bool_mask(*args):
        mask = args[position]
        if mask.data.dtype != np.bool_:
            mask = interpreter.TensorHandle(mask.data != 0, tl.int1)
        return access(*args[:position], mask, *args[position + 1 :])

    return with_bool_mask
