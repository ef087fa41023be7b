"""Lets vLLM on a CPU take its Triton kernels, run by Triton's interpreter, and with them Runner V2.

A test puts this folder on PYTHONPATH, so that every process of an engine loads it at start. The CPU
build of vLLM looks for a Triton backend named "cpu"; the stand-in says that it is active, and
TRITON_INTERPRET=1 does the rest. Orders of magnitude too slow for anything but tests.
"""

import os
from types import SimpleNamespace

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

    from interpreter_gaps import fill

    fill()
