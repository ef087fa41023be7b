"""What each worker of a server says of itself, for `--worker-extension-cls look.Look`."""

import torch
from vllm.distributed import get_tp_group


class Look:
    def look(self):
        """The rank, the class of its sampler, and the tokens of the request that it last held."""
        runner = self.model_runner
        return [
            self.rank,
            type(runner.rejection_sampler).__module__,
            runner.input_batch.token_ids_cpu[0].tolist(),
        ]

    def node(self):
        """The rank, its node's address, and whether it reaches the others over the network."""
        import ray

        is_sent = get_tp_group().device_communicator.dist_module is torch.distributed
        return [self.rank, ray.util.get_node_ip_address(), is_sent]
