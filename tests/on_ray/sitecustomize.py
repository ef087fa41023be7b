"""Runs vLLM's Ray executor on a CPU, and lets one node differ from the others.

Python imports this file in every process whose PYTHONPATH has its directory. vLLM's CPU platform
has no Ray device, so its Ray executors refuse it; here each virtual GPU of a test cluster is a slot
for a rank. vLLM's computation does not change.

VLLM_MARS_TEST_NODE in the environment of a node hides vllm_mars there ("without"), changes its
version ("version X"), or names the node. With VLLM_MARS_TEST_MEASURE=stand-in a sweep's tasks start
no servers.
"""

import os
import sys

import wrapt


def _give_the_cpu_a_ray_device(module):
    module.CpuPlatform.ray_device_key = "GPU"


class _Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm_mars":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


wrapt.register_post_import_hook(_give_the_cpu_a_ray_device, "vllm.platforms.cpu")

_node = os.environ.get("VLLM_MARS_TEST_NODE", "")
if _node == "without":
    sys.meta_path.insert(0, _Hide())
elif _node.startswith("version "):
    wrapt.register_post_import_hook(
        lambda module: setattr(module, "__version__", _node.removeprefix("version ")), "vllm_mars"
    )

if os.environ.get("VLLM_MARS_TEST_MEASURE") == "stand-in":

    def _stand_in(module):
        from stand_in_measure import StandIn

        module.LocalRunner = StandIn

    wrapt.register_post_import_hook(_stand_in, "vllm_mars.lab.ray_turns")
