"""Takes the place of a sweep's measurement in Ray's workers: cells that say where they were."""

import os
import time

SECONDS = 1.0


class StandIn:
    """In the place of a `LocalRunner`."""

    def __init__(self, sweep, log_dir):
        self._sweep = sweep

    def run(self, groups):
        """A cell a second, whose reason is the name of the node."""
        for group in groups:
            for key, _ in group.cells:
                time.sleep(SECONDS)
                yield self._sweep.failed(key, os.environ["VLLM_MARS_TEST_NODE"])
