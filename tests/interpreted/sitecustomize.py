"""Runs vLLM's Triton kernels, and with them Model Runner V2, in Triton's interpreter on a CPU.

A test puts this folder on PYTHONPATH, so that every process of an engine loads it at start. vLLM's
CPU build looks for a Triton backend named "cpu", which is faked here; TRITON_INTERPRET=1 does the
rest. It is slow by orders of magnitude.
"""

import os
from types import SimpleNamespace

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

    from interpreter_gaps import fill

    fill()
