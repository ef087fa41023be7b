"""The terms of verification: what every backend takes and gives, and nothing of how."""

from typing import NamedTuple

import torch

from vllm_mars.kernels.kept.naive import Protected
from vllm_mars.kernels.ledger.naive import UNIT
from vllm_mars.kernels.record import Records
from vllm_mars.kernels.rules import Rule

# In the place of a draft token that was drawn and that a grammar has struck out since.
STRUCK = -2


class Terms(NamedTuple):
    """What holds for all requests of an engine.

    Attributes:
        rule: by which their drafts are verified.
        protected: the tokens that keep their probability, or None.
    """

    rule: Rule
    protected: Protected | None = None


class Step(NamedTuple):
    """A step as every backend takes it, in the layout of vLLM's Model Runner V2.

    A request's rows are those of its draft tokens, then its bonus row.

    Attributes:
        logits: `[num_rows, vocab]` float32, bfloat16 or float16, any row stride.
        input_ids: `[num_rows]` int32 or int64, the model's input tokens: a row's draft token is the
            next entry; outside [0, vocab) is padding, but where drafts are drawn STRUCK. That of a
            request's first row is the last token before the step, or -1.
        cu_num_logits: `[batch]` int32, inclusive prefix sum of the requests' rows.
        records: of all slots.
        slots: int32 or int64 `[batch]`, the slot of each request.
        total_len: int32 `[S]`, tokens of prompt and output before this step, by slot.
        prompt_len: int32 `[S]`.
        num_speculative_tokens: K, the longest draft of a request, or more, which sets the width of
            what is emitted.
    """

    logits: torch.Tensor
    input_ids: torch.Tensor
    cu_num_logits: torch.Tensor
    records: Records
    slots: torch.Tensor
    total_len: torch.Tensor
    prompt_len: torch.Tensor
    num_speculative_tokens: int


class Sampling(NamedTuple):
    """How the requests of all slots sample.

    Attributes:
        temperature: float32 `[S]`; a request of temperature 0 is greedy.
        seeds: int64 `[S]`, of the random numbers.
        draft_logits: `[S, steps, vocab]`, contiguous, before temperature, where drafts are drawn.
        drawn_at: float32 `[S]`, with `draft_logits`: the temperature that they are drawn at; 0 of a
            greedy request, of which nothing is read there. On the device, where `temperature` lies
            in the host's memory.
        next_seeds: int64 `[S]`, where drafts are drawn: a step writes there with which seed the
            next draft is drawn. None where vLLM sees to it.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    draft_logits: torch.Tensor | None = None
    drawn_at: torch.Tensor | None = None
    next_seeds: torch.Tensor | None = None


class Draws(NamedTuple):
    """What the draws of a step read, as Model Runner V2 has it.

    Attributes:
        sampling: of all slots.
        pos: int64 `[num_rows]`, which the random numbers of a row are made of, too.
        row_slots: int32 or int64 `[num_rows]`, the slot of each row.
        row_places: int32 `[num_rows]`, its place within its request.
        use_fp64: whether the noise of a draw is float64.
        divides: whether the logits are divided by the temperature here, as vLLM's kernel does it;
            else they have been.
    """

    sampling: Sampling
    pos: torch.Tensor
    row_slots: torch.Tensor
    row_places: torch.Tensor
    use_fp64: bool = False
    divides: bool = False


class VerifyOutput(NamedTuple):
    """What one verification step emits.

    Attributes:
        output_token_ids: `[batch, K + 1]` int32; the accepted drafts, then the
            corrected or the bonus token, then -1.
        num_emitted: `[batch]` int32, accepted draft tokens and the token behind them.
        num_relaxed: `[batch]` int32, those of them that only the rule accepted.
        lost: `[batch]` int64, what these lost against the first choice, in units of 2**-LOSS_BITS
            nats.
    """

    output_token_ids: torch.Tensor
    num_emitted: torch.Tensor
    num_relaxed: torch.Tensor
    lost: torch.Tensor

    @property
    def num_accepted(self) -> torch.Tensor:
        """Accepted draft tokens; int32 `[batch]`."""
        return self.num_emitted - 1

    @property
    def loss(self) -> torch.Tensor:
        """`lost` in nats: the sum of log p(first choice) - log p(token); float32 `[batch]`."""
        return self.lost.float() * UNIT
