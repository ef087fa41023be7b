"""A worker extension that delays counts by an hour: `--worker-extension-cls slow_counts.Engine`.

Then counts arrive only when the engine becomes idle.
"""

import functools

from vllm_mars.report.counters import Counters
from vllm_mars.worker import sampler_v1

sampler_v1.Counters = functools.partial(Counters, interval=3600.0)


class Engine:
    """Adds no methods to the worker."""
