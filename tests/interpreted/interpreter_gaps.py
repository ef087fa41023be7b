"""Features that Triton's interpreter lacks for vLLM's kernels.

Written for Triton 3.9. If a later release has a feature, its part here is superfluous, not wrong.
"""

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter


def fill() -> None:
    """Adds the features in this process."""
    # Functions of the device library are empty and return None.
    libdevice.exp2, libdevice.log1p = _of_numpy(np.exp2), _of_numpy(np.log1p)
    interpreter._patch_lang_core = _with_tensor_range(interpreter._patch_lang_core)
    interpreter._patch_lang = _once(interpreter._patch_lang)
    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = _with_bool_mask(builder.create_masked_load, 2)
    builder.create_masked_store = _with_bool_mask(builder.create_masked_store, 3)


def _of_numpy(function):
    return lambda x: tl.tensor(interpreter.TensorHandle(function(x.handle.data), x.dtype), x.type)


def _with_tensor_range(patch_lang_core):
    """Makes `tl.range` count in tensors, as on hardware, so that they have `.to`."""

    def patched(lang, scope):
        patch_lang_core(lang, scope)
        numbers = lang.range

        def tensors(*args, **kwargs):
            return map(interpreter._implicit_cvt, numbers(*args, **kwargs))

        scope.set_attr(lang, "range", tensors)

    return patched


def _once(patch_lang):
    """Patches the language only if the calling kernel has not done so.

    Otherwise the interpreter searches the whole language at each call inside a kernel, which takes
    half the time of vLLM's kernels.
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
    """Converts a mask to bool by `!= 0`, as hardware does.

    The interpreter gives a comparison the type of its operands. Broadcast over a block
    (`mask & is_valid`), it becomes a block of int64, which load and store refuse as a mask.
    """

    def with_bool_mask(*args):
        mask = args[position]
        if mask.data.dtype != np.bool_:
            mask = interpreter.TensorHandle(mask.data != 0, tl.int1)
        return access(*args[:position], mask, *args[position + 1 :])

    return with_bool_mask
