"""The margin rule as one engine applies it, shared by the samplers of both model runners."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger
from typing import Any, NamedTuple

import torch

from vllm_mars.config import MarsConfig
from vllm_mars.kernels.reference import Judgement, RelaxedBudget, Verdict
from vllm_mars.runner.counters import Counters, count_positions, count_shadow, locate
from vllm_mars.verify import Backend, judge_positions, resolve_backend

# (theta, gap) that any draft token among the two largest passes, for shadow mode to judge.
_LOOSEST = (1.0, 3e38)


class Limits(NamedTuple):
    """What the requests of a step allow.

    Attributes:
        theta: of the comparison `z2 > theta * z1 - gap`; a float, or float32 `[batch]`.
        gap: of the same.
        blocked: int8 `[num_draft]`, a `Verdict` where the rule stays strict, else 0; or None.
        budget: how much of each request may be relaxed, or None.
    """

    theta: float | torch.Tensor
    gap: float | torch.Tensor
    blocked: torch.Tensor | None = None
    budget: RelaxedBudget | None = None


class Relaxed(NamedTuple):
    """The relaxed tokens of a step, for the requests that want to know them.

    Attributes:
        request_ids: ids of these requests by their place in the batch.
        is_relaxed: bool `[batch, width]`, by place and offset among the step's tokens.
    """

    request_ids: dict[int, str]
    is_relaxed: torch.Tensor


class MarginRule:
    """Thresholds and protected tokens of one engine, and what it tells of their use.

    Args:
        config: the options.
        protected_token_ids: tokens at which verification stays strict.
        backend: as in `vllm_mars.verify_greedy`.

    Attributes:
        counters: where verified positions are counted, or None on a rank that counts nothing.
        relaxed: what requests want to know of the steps since it was last emptied.
    """

    def __init__(
        self, config: MarsConfig, protected_token_ids: list[int], backend: Backend = "auto"
    ) -> None:
        self.config = config
        self.thresholds = config.thresholds
        self.protected_token_ids = protected_token_ids
        self.backend = backend
        self.counters: Counters | None = None
        self.relaxed: list[Relaxed] = []
        self._protected: torch.Tensor | None = None

    def protected_mask(self, logits: torch.Tensor) -> torch.Tensor | None:
        """The protected tokens as bool `[vocab]` on the logits' device, or None without any.

        Built on the first call, because only the logits tell how wide the model's output is.
        """
        if not self.protected_token_ids:
            return None
        if self._protected is None or self._protected.shape[0] != logits.shape[1]:
            mask = torch.zeros(logits.shape[1], dtype=torch.bool)
            mask[[token for token in self.protected_token_ids if token < len(mask)]] = True
            self._protected = mask.to(logits.device)
        return self._protected

    def arguments(self, logits: torch.Tensor, limits: Limits) -> dict[str, Any]:
        """The keyword arguments of the verifying functions for a step.

        Args:
            logits: `[num_rows, vocab]`.
            limits: what the requests allow.
        """
        theta, gap = _LOOSEST if self.config.shadow else (limits.theta, limits.gap)
        return {
            "theta": theta,
            "gap": gap,
            "protected": self.protected_mask(logits),
            "blocked": limits.blocked,
            "budget": limits.budget,
            "backend": self.backend,
        }

    def greedy_arguments(self, logits: torch.Tensor, limits: Limits) -> dict[str, Any]:
        """The same for greedy verification."""
        return {
            **self.arguments(logits, limits),
            "with_verdicts": self.counters is not None,
            "dry_run": self.config.shadow,
        }

    @contextmanager
    def relaxed_made_certain(
        self,
        logits: torch.Tensor,
        draft_token_ids: torch.Tensor,
        cu_num_draft_tokens: torch.Tensor,
        limits: Limits,
    ) -> Iterator[Judgement | None]:
        """Makes the draft token the target's certain choice where relaxed, within the context.

        A rejection sampler then accepts it: it is the argmax, and its probability is 1, so at least
        that of the draft. Positions that are not relaxed, the random numbers and the corrections
        stay as they are. On exit the logits are again what they were, so logprobs are the true
        ones.

        Args:
            logits: `[num_draft, vocab]` processed logits, changed in place.
            draft_token_ids: `[num_draft]`; ids outside the vocabulary are never relaxed.
            cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum.
            limits: what the requests allow.

        Yields:
            What was judged, or None where nothing can be relaxed and nothing is counted.
        """
        is_own = isinstance(limits.theta, torch.Tensor)
        if self.counters is None and not is_own and (limits.theta, limits.gap) == (1, 0):
            yield None
            return
        judgement = judge_positions(
            logits,
            draft_token_ids,
            cu_num_draft_tokens,
            with_top2_values=self.counters is not None,
            **self.arguments(logits, limits),
        )
        if self.config.shadow:
            yield judgement
            return
        is_relaxed = judgement.verdicts == Verdict.RELAXED
        index = draft_token_ids.long().clamp(0, logits.shape[1] - 1)[:, None]
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
        limits: Limits,
        judgement: Judgement,
        num_accepted: torch.Tensor,
        draft_token_ids: torch.Tensor,
        cu_num_draft_tokens: torch.Tensor,
        returns: dict[int, str],
    ) -> torch.Tensor | None:
        """Counts a step, and notes what was relaxed for the requests that want to know it.

        Args:
            limits: what the requests allowed.
            judgement: of the step's positions; its values are None where nothing is counted.
            num_accepted: int `[batch]`, accepted draft tokens.
            draft_token_ids: `[num_draft]`; -1 is padding.
            cu_num_draft_tokens: int32 `[batch]`, inclusive prefix sum.
            returns: ids by place of the requests that want to know.

        Returns:
            int32 `[batch]`, relaxed tokens of each request where that is needed: where a budget
            limits them; else None.
        """
        verdicts, top2_values = judgement
        if self.counters is not None and top2_values is not None:
            arguments = (
                self.counters,
                top2_values,
                verdicts,
                num_accepted,
                draft_token_ids,
                cu_num_draft_tokens,
            )
            count_positions(*arguments, limits.theta, limits.gap, dry_run=self.config.shadow)
            if self.config.shadow:
                count_shadow(*arguments)
        if limits.budget is None and not returns:
            return None
        # A step's tokens are the accepted drafts and one more.
        request, offset = locate(cu_num_draft_tokens, verdicts.shape[0])
        is_relaxed = (verdicts == Verdict.RELAXED) & (offset < num_accepted[request])
        is_relaxed &= not self.config.shadow
        if returns:
            width = verdicts.shape[0] or 1
            if self.counters is not None:
                width = self.counters.layout.num_speculative_tokens + 1
            table = torch.zeros(
                (num_accepted.shape[0], width), dtype=torch.bool, device=verdicts.device
            )
            table[request, offset] = is_relaxed
            self.relaxed.append(Relaxed(returns, table))
        if limits.budget is None:
            return None
        return torch.zeros_like(limits.budget.num_relaxed).index_add_(0, request, is_relaxed.int())

    def log_start(self, logger: Logger, runner: str, device: torch.device) -> None:
        """Logs once, on the first tensor-parallel rank, what verification this engine does."""
        from vllm.distributed import get_tensor_model_parallel_rank

        if get_tensor_model_parallel_rank() != 0:
            return
        theta, gap = self.thresholds
        threshold = f"theta={theta:g}" if self.config.metric == "ratio" else f"gap={gap:g} nats"
        logger.info(
            "Margin-aware verification (MARS) is on: metric=%s, %s, %d protected tokens, "
            "model runner %s, %s backend; %s",
            self.config.metric,
            threshold,
            len(self.protected_token_ids),
            runner,
            resolve_backend(self.backend, device.type),
            self._loss(),
        )

    def _loss(self) -> str:
        if self.config.shadow:
            return "shadow mode: the output is lossless (strict), other thetas are counted."
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
