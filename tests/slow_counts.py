"""`--worker-extension-cls slow_counts.Engine`, with this folder on PYTHONPATH: counts wait an hour.

On a CPU they wait for nothing. So only what is sent when the engine goes idle arrives.
"""

import functools

from vllm_mars.report.counters import Counters
from vllm_mars.worker import sampler_v1

sampler_v1.Counters = functools.partial(Counters, interval=3600.0)


class Engine:
    """A worker's further methods: none."""
