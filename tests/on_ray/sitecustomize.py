"""Lets vLLM's Ray executor run on a CPU, and makes one node differ from the others. For tests.

Python imports this file in every process whose PYTHONPATH names its directory. vLLM's CPU platform
has no Ray device, which its Ray executors refuse; here the GPUs that a test cluster pretends to
have stand for slots of the machine. Nothing of vLLM's computation changes.

Its ranks on CPUs meet in shared memory under a name that is the same on each node, since it holds
no more than the port where they met; here it holds VLLM_HOST_IP, too, so that ranks with different
addresses send each other what they compute, as vLLM has it where the names differ.

VLLM_MARS_TEST_NODE in the environment of a node: "without" hides vllm_mars there, "version X" makes
it version X; anything else is its name. VLLM_MARS_TEST_MEASURE=stand-in spares a sweep's tasks
their servers.
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


def _name_the_node(module):
    named = module._CPUSHMDistributed.make_group_name
    module._CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: f"{named(communicator)}-{os.environ.get('VLLM_HOST_IP')}"
    )


wrapt.register_post_import_hook(_give_the_cpu_a_ray_device, "vllm.platforms.cpu")
wrapt.register_post_import_hook(
    _name_the_node, "vllm.distributed.device_communicators.cpu_communicator"
)

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

    wrapt.register_post_import_hook(_stand_in, "vllm_mars.experiments.ray_turns")
