"""Margin-aware verification (MARS, arXiv 2601.15498) for vLLM's speculative decoding.

Importing this package imports neither vllm nor triton; public names are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_mars.functions.trees import verify_tree
    from vllm_mars.functions.verify import verify_greedy
    from vllm_mars.options.config import MarsConfig
    from vllm_mars.worker.sampler_v1 import MarsRejectionSampler
    from vllm_mars.worker.sampler_v2 import MarsRejectionSamplerV2

__version__ = "0.1.0"

__all__ = [
    "MarsConfig",
    "MarsRejectionSampler",
    "MarsRejectionSamplerV2",
    "verify_greedy",
    "verify_tree",
]

_MODULE_OF = {
    "MarsConfig": "vllm_mars.options.config",
    "MarsRejectionSampler": "vllm_mars.worker.sampler_v1",
    "MarsRejectionSamplerV2": "vllm_mars.worker.sampler_v2",
    "verify_greedy": "vllm_mars.functions.verify",
    "verify_tree": "vllm_mars.functions.trees",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
