"""What each worker of a server says of itself, for `--worker-extension-cls look.Look`."""


class Look:
    def look(self):
        """The rank, the class of its sampler, and the tokens of the request that it last held."""
        runner = self.model_runner
        return [
            self.rank,
            type(runner.rejection_sampler).__module__,
            runner.input_batch.token_ids_cpu[0].tolist(),
        ]
