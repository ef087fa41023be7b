"""Records what verification sees, inside vLLM's workers, for the offline simulation."""

from typing import Any

# What is recorded of each verified draft position, in this order.
FIELDS = (
    *("request", "step", "position", "draft", "first"),
    *("draft_logit", "first_logit", "second_logit"),
)


class RecordingWorker:
    """A `worker_extension_cls` of vLLM: its methods are called through `LLM.collective_rpc`.

    It needs model runner V1 with a `MarsRejectionSampler`, and greedy requests without logits
    processors, whose raw logits are what verification compares.
    """

    model_runner: Any

    def mars_record(self) -> list[int] | None:
        """Starts recording; returns the protected tokens, None where this worker does not sample.

        Raises:
            RuntimeError: the worker's runner is not V1 with this project's sampler.
        """
        runner = self.model_runner
        # Only the last pipeline stage samples.
        if getattr(runner, "rejection_sampler", None) is None:
            return None
        from vllm_mars.runner.sampler_v1 import MarsRejectionSampler

        sampler = runner.rejection_sampler
        if not isinstance(sampler, MarsRejectionSampler):
            raise RuntimeError(
                f"recording needs model runner V1 with MARS, not {type(sampler).__qualname__}; set "
                "VLLM_USE_V2_MODEL_RUNNER=0 and rejection_sample_method='mars'."
            )
        self._mars_records: list[list[Any]] = []
        self._mars_step = 0
        self._mars_hook = sampler.register_forward_pre_hook(self._mars_look)
        return sampler.rule.protected_token_ids

    def mars_take_records(self) -> list[list[Any]]:
        """Stops recording, and returns the recorded positions as rows of `FIELDS`."""
        if not hasattr(self, "_mars_hook"):
            return []
        self._mars_hook.remove()
        records, self._mars_records = self._mars_records, []
        return records

    def _mars_look(self, sampler: Any, arguments: tuple[Any, ...]) -> None:
        import torch

        from vllm_mars.kernels.reference import top2

        metadata, _, logits, _ = arguments
        if not metadata.draft_token_ids.shape[0]:
            return
        rows = logits[metadata.target_logits_indices].float()
        drafts = metadata.draft_token_ids.long()
        values, ids = top2(rows)
        # A padding id is outside the vocabulary and never accepted.
        inside = (drafts >= 0) & (drafts < rows.shape[1])
        draft_logits = rows.gather(1, drafts.clamp(0, rows.shape[1] - 1)[:, None]).squeeze(1)
        draft_logits = torch.where(inside, draft_logits, -torch.inf)
        columns = [
            *(drafts.tolist(), ids[:, 0].tolist(), draft_logits.tolist()),
            *(values[:, 0].tolist(), values[:, 1].tolist()),
        ]
        rest = zip(*columns, strict=True)
        for request, count in zip(
            self.model_runner.input_batch.req_ids, metadata.num_draft_tokens, strict=False
        ):
            for position in range(count):
                self._mars_records.append([request, self._mars_step, position, *next(rest)])
            self._mars_step += 1
