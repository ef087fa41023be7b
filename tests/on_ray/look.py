"""A worker extension that describes each worker: `--worker-extension-cls look.Look`."""


class Look:
    def look(self):
        """Returns the rank, the module of its sampler, and the tokens of its last request."""
        runner = self.model_runner
        return [
            self.rank,
            type(runner.rejection_sampler).__module__,
            runner.input_batch.token_ids_cpu[0].tolist(),
        ]
