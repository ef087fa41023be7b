"""Alternative draft distributions for `states`."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch


class DrawnUnder(NamedTuple):
    """Sampling parameters of a draft distribution."""

    share: float = 1.0  # of the request's temperature
    margin: float | None = 0.0  # increase of top-p; None for neither top-p nor top-k
    penalties: bool = True  # whether the request's penalties apply

    def of(self, sampling_metadata: Any) -> Any:
        """Returns a batch's sampling metadata with these parameters."""
        changes = {
            "temperature": sampling_metadata.temperature * self.share,
            "no_penalties": bool(sampling_metadata.no_penalties) or not self.penalties,
        }
        if self.margin is None:
            changes |= {"top_k": None, "top_p": None}
        elif sampling_metadata.top_p is not None:
            changes["top_p"] = (sampling_metadata.top_p + self.margin).clamp(max=1.0)
        return replace(sampling_metadata, **changes)


def draw_as_vllm(runner: Any, others: list[DrawnUnder]) -> None:
    """Makes a V1 runner sample drafts as vLLM does and report other distributions of them.

    Args:
        runner: runner with MARS; its draft probabilities become `[rows, (1 + others) * vocab]`.
        others: distributions to report, conditioned on the same tokens.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    from vllm_mars.worker.draft_sampling_v1 import under_parameters

    drafter = runner.drafter
    propose = runner.propose_draft_token_ids
    emitted: list[list[int]] = []
    drafted: list[torch.Tensor] = []

    def propose_and_note(scheduler_output: Any, sampled: torch.Tensor, *args: Any) -> Any:
        emitted[:] = sampled.tolist()
        drafted.clear()
        return propose(scheduler_output, sampled, *args)

    def sample(logits: torch.Tensor, sampling_metadata: Any) -> Any:
        other_probs = []
        for other in others:
            metadata = other.of(sampling_metadata)
            row, rest = under_parameters(logits.clone(), metadata, emitted, drafted)
            temperature = rest.temperature.masked_fill(rest.temperature == 0, 1)
            other_probs.append((row.float() / temperature[:, None]).softmax(-1))
        tokens, probs = SpecDecodeBaseProposer._sample_from_logits(
            drafter, logits, sampling_metadata
        )
        drafted.append(tokens)
        return tokens, torch.cat([probs, *other_probs], 1)

    runner.propose_draft_token_ids = propose_and_note
    drafter._sample_from_logits = sample
