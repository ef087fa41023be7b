"""The margin rule as one engine applies it, shared by the samplers of both model runners."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger
from typing import NamedTuple

import torch

from vllm_mars.config import MarsConfig
from vllm_mars.kernels.terms import (
    LOSS_BITS,
    MOST_PRICE,
    Drafts,
    Judgement,
    Margin,
    Verdict,
    VerifyOutput,
)
from vllm_mars.runner.counters import Counters, count_positions, count_shadow
from vllm_mars.verify import Backend, judge_drafts, resolve_backend, verify_drafts

# A gap that any draft token among the two largest passes, and the largest price, for shadow mode to
# judge.
_LOOSEST = {"theta": 1.0, "gap": 3e38}
_HIGHEST = {"price": MOST_PRICE / 2**LOSS_BITS}

# Of the value that the log names, by rule.
_UNITS = {"theta": "", "gap": " nats", "price": " nats per token"}


class RelaxedOffsets(NamedTuple):
    """The relaxed tokens of a step, for the requests that want to know them.

    Attributes:
        request_ids: ids of these requests by their place in the batch.
        losses: int32 `[batch, width]`, by place and offset among the step's tokens: what a relaxed
            token lost, in units of 2**-LOSS_BITS nats, -1 at the others.
    """

    request_ids: dict[int, str]
    losses: torch.Tensor


class MarginRule:
    """Verifies one engine's steps by its options, and tells what was relaxed.

    Args:
        config: the options.
        protected_token_ids: tokens at which verification stays strict.
        backend: "triton", "torch", or "auto": Triton on an accelerator, torch on a CPU.

    Attributes:
        counters: where verified positions are counted, or None on a rank that counts nothing.
        relaxed: what requests want to know of the steps since it was last emptied.
    """

    def __init__(
        self, config: MarsConfig, protected_token_ids: list[int], backend: Backend = "auto"
    ) -> None:
        self.config = config
        self.protected_token_ids = protected_token_ids
        self.backend = backend
        self.counters: Counters | None = None
        self.relaxed: list[RelaxedOffsets] = []
        self._protected: torch.Tensor | None = None

    def verify(
        self, drafts: Drafts, margin: Margin, returns: dict[int, str] | None = None
    ) -> VerifyOutput:
        """Verifies greedy requests, and records the step where positions are counted.

        Args:
            drafts: the step's.
            margin: what the requests allow; the protected tokens are added here.
            returns: ids by place of the requests that want to know what was relaxed.
        """
        output = verify_drafts(
            drafts,
            self._applied(margin, drafts.logits),
            with_verdicts=self.counters is not None,
            dry_run=self.config.is_shadow,
            backend=self.backend,
        )
        if output.judgement is not None:
            rows = drafts.by_position()
            self.record(
                rows, margin, output.judgement, output.num_accepted, returns, is_greedy=True
            )
        return output

    def _applied(self, margin: Margin, logits: torch.Tensor) -> Margin:
        """The margin that the verdicts follow: in shadow mode the loosest, and what is protected.

        The mask of the protected tokens, bool `[vocab]`, is built on the first call, because only
        the logits tell how wide the model's output is.
        """
        vocab = logits.shape[1]
        if self.protected_token_ids and (
            self._protected is None or self._protected.shape[0] != vocab
        ):
            mask = torch.zeros(vocab, dtype=torch.bool)
            mask[[token for token in self.protected_token_ids if token < vocab]] = True
            self._protected = mask.to(logits.device)
        if self.config.is_shadow:
            margin = margin._replace(**_LOOSEST if margin.price is None else _HIGHEST)
        return margin._replace(protected=self._protected)

    @contextmanager
    def relaxed_made_certain(
        self, drafts: Drafts, margin: Margin, is_greedy: torch.Tensor | bool = False
    ) -> Iterator[Judgement | None]:
        """Makes the draft token the target's certain choice where relaxed, within the context.

        A rejection sampler then accepts it: it is the argmax, and its probability is 1, so at least
        that of the draft. Positions that are not relaxed, the random numbers and the corrections
        stay as they are. On exit the logits are again what they were, so logprobs are the true
        ones.

        Args:
            drafts: the step's, with processed logits, which are changed in place; a row for each
                draft, in order.
            margin: what the requests allow; the protected tokens are added here.
            is_greedy: bool `[batch]`, which requests are verified as a whole, as `verify` does it,
                with `max_draft_len` given; False where all of them sample.

        Yields:
            What was judged, or None where nothing can be relaxed and nothing is counted.
        """
        if self.counters is None and margin.is_strict:
            yield None
            return
        logits = drafts.logits
        applied = self._applied(margin, logits)
        judgement = judge_drafts(
            drafts,
            applied,
            with_top2_values=self.counters is not None,
            backend=self.backend,
        )
        if isinstance(is_greedy, torch.Tensor):
            output = verify_drafts(
                drafts,
                applied,
                with_verdicts=True,
                dry_run=self.config.is_shadow,
                backend=self.backend,
            )
            request, _ = drafts.locate()
            verdicts = torch.where(is_greedy[request], output.verdicts, judgement.verdicts)
            judgement = judgement._replace(verdicts=verdicts)
        if self.config.is_shadow:
            yield judgement
            return
        is_relaxed = judgement.verdicts == Verdict.RELAXED
        index = drafts.draft_token_ids.long().clamp(0, logits.shape[1] - 1)[:, None]
        true_logits = logits.gather(1, index)
        # The largest finite logit: its probability is exactly 1, and softmax meets no inf - inf.
        certain = torch.finfo(logits.dtype).max
        logits.scatter_(1, index, torch.where(is_relaxed[:, None], certain, true_logits))
        try:
            yield judgement
        finally:
            logits.scatter_(1, index, true_logits)

    def record(
        self,
        drafts: Drafts,
        margin: Margin,
        judgement: Judgement,
        num_accepted: torch.Tensor,
        returns: dict[int, str] | None = None,
        *,
        is_greedy: torch.Tensor | bool = False,
    ) -> torch.Tensor | None:
        """Counts a step, and notes what was relaxed for the requests that want to know it.

        Args:
            drafts: the step's, by position; the logits are not read.
            margin: what the requests allowed.
            judgement: of the step's positions; its values are None where nothing is counted.
            num_accepted: int `[batch]`, accepted draft tokens.
            returns: ids by place of the requests that want to know.
            is_greedy: bool `[batch]`, or one for all: whether a request was verified as a whole,
                not judged by position.

        Returns:
            Where a budget limits it, what was lost, int64 `[batch]` in units of 2**-LOSS_BITS
            nats; else None.
        """
        verdicts = judgement.verdicts
        if self.counters is not None and judgement.top2_values is not None:
            # By a price a position is low-margin where the runner-up would pay for itself.
            counted = margin if margin.price is None else margin._replace(gap=margin.price)
            count_positions(
                self.counters,
                drafts,
                judgement,
                num_accepted,
                counted,
                dry_run=self.config.is_shadow,
            )
            if self.config.is_shadow:
                count_shadow(self.counters, drafts, judgement, num_accepted, is_greedy=is_greedy)
        has_budget = margin.loss_budget is not None
        if not has_budget and not returns:
            return None
        # A step's tokens are the accepted drafts and one more.
        request, offset = drafts.locate()
        is_relaxed = (verdicts == Verdict.RELAXED) & (offset < num_accepted[request])
        is_relaxed &= not self.config.is_shadow
        if returns:
            width = verdicts.shape[0] or 1
            if self.counters is not None:
                width = self.counters.layout.num_speculative_tokens + 1
            table = torch.full(
                (num_accepted.shape[0], width), -1, dtype=torch.int32, device=verdicts.device
            )
            table[request, offset] = torch.where(is_relaxed, judgement.losses, -1)
            self.relaxed.append(RelaxedOffsets(returns, table))
        if not has_budget:
            return None
        lost = torch.where(is_relaxed, judgement.losses, 0).long()
        return torch.zeros_like(num_accepted, dtype=torch.int64).index_add_(0, request, lost)

    def log_start(self, logger: Logger, runner: str, device: torch.device) -> None:
        """Logs once, on the first tensor-parallel rank, what verification this engine does."""
        from vllm.distributed import get_tensor_model_parallel_rank

        if get_tensor_model_parallel_rank() != 0:
            return
        rule, bound = self.config.rule, self.config.max_loss
        logger.info(
            "Margin-aware verification (MARS) is on: mars_%s=%g%s, %s, %d protected tokens, "
            "model runner %s, %s backend; %s",
            rule,
            self.config.value,
            _UNITS[rule],
            "no mars_max_loss" if bound is None else f"mars_max_loss={bound:g} nats per token",
            len(self.protected_token_ids),
            runner,
            resolve_backend(self.backend, device.type),
            self._loss(),
        )

    def _loss(self) -> str:
        if self.config.is_shadow:
            return "shadow mode: the output is lossless (strict), other thresholds are counted."
        if self.config.lossy:
            return "the output is LOSSY: it can differ from the target's own."
        if self.config.clients_may_relax:
            return "the output is lossless (strict) unless a request chooses otherwise."
        return "the output is lossless (strict)."


def require_own_sampler(sampler: object, own: type) -> None:
    """Refuses a runner whose rejection sampler is not vLLM's own class.

    Args:
        sampler: the runner's rejection sampler.
        own: vLLM's class.

    Raises:
        RuntimeError: the sampler is of another class; the message names it.
    """
    if type(sampler) is not own:
        raise RuntimeError(
            f"The rejection sampler is already {type(sampler).__module__}."
            f"{type(sampler).__qualname__}, not vLLM's own; only one extension can verify drafts, "
            "so disable the other one (VLLM_PLUGINS lists the plugins to load)."
        )
