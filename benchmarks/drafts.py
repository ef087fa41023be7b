"""What drafts are drawn from, and from what else they could be, for `states`."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch


class DrawnUnder(NamedTuple):
    """What drafts are drawn under beside the request's penalties.

    Attributes:
        share: of the temperature.
        margin: what is added to top-p; None for drafts that are not cut.
        penalties: whether there are any.
    """

    share: float = 1.0
    margin: float | None = 0.0
    penalties: bool = True

    def of(self, sampling_metadata: Any) -> Any:
        """The metadata of a batch whose drafts are drawn so."""
        own = {"temperature": sampling_metadata.temperature * self.share}
        if self.margin is None:
            own |= {"top_k": None, "top_p": None}
        elif sampling_metadata.top_p is not None:
            own |= {"top_p": (sampling_metadata.top_p + self.margin).clamp(max=1.0)}
        return replace(sampling_metadata, **own, no_penalties=self._has_none(sampling_metadata))

    def _has_none(self, sampling_metadata: Any) -> bool:
        return bool(sampling_metadata.no_penalties) or not self.penalties


def draw_as_vllm(runner: Any, others: list[DrawnUnder]) -> None:
    """Lets a V1 runner draw drafts as vLLM does, and tell what else they could be drawn from.

    Args:
        runner: with MARS. Each row of its draft probabilities gets those of the others behind it.
        others: the other distributions, given the same tokens.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    from vllm_mars.worker.draft_sampling_v1 import under_parameters

    drafter, propose = runner.drafter, runner.propose_draft_token_ids
    emitted: list[list[int]] = []
    drafted: list[torch.Tensor] = []

    def propose_and_note(scheduler_output: Any, sampled: torch.Tensor, *args: Any) -> Any:
        emitted[:] = sampled.tolist()
        drafted.clear()
        return propose(scheduler_output, sampled, *args)

    def sample(logits: torch.Tensor, sampling_metadata: Any) -> Any:
        found = []
        for other in others:
            own = other.of(sampling_metadata)
            row, rest = under_parameters(logits.clone(), own, emitted, drafted)
            temperature = rest.temperature.masked_fill(rest.temperature == 0, 1)
            found.append((row.float() / temperature[:, None]).softmax(-1))
        drawn, probs = SpecDecodeBaseProposer._sample_from_logits(
            drafter, logits, sampling_metadata
        )
        drafted.append(drawn)
        return drawn, torch.cat([probs, *found], 1)

    runner.propose_draft_token_ids, drafter._sample_from_logits = propose_and_note, sample
