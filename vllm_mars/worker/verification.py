"""Verification as one engine applies it, shared by the samplers of both model runners."""

from logging import Logger
from typing import NamedTuple

import torch

from vllm_mars.kernels.account.naive import Account
from vllm_mars.kernels.kept.naive import Protected
from vllm_mars.kernels.step import Terms
from vllm_mars.options.config import MarsConfig
from vllm_mars.report.counters import Counters


class Returned(NamedTuple):
    """What a step did, for the requests that want to know it.

    Attributes:
        request_ids: ids of these requests by their place in the batch.
        table: float32 `[batch, 2, width]`: see `Account`.
        copy: on its way to the host, and the event behind it; None where the table is there.
    """

    request_ids: dict[int, str]
    table: torch.Tensor
    copy: tuple[torch.Tensor, torch.Event] | None = None


class Verification:
    """Verifies one engine's steps by its options, and writes down what they did.

    Args:
        config: the options.
        protected_token_ids: tokens that keep their probability.
        counters: where positions are counted.

    Attributes:
        num_speculative_tokens: K, the longest draft of the engine.
        returned: what requests want to know of the steps since it was last emptied.
    """

    def __init__(
        self,
        config: MarsConfig,
        protected_token_ids: list[int],
        counters: Counters,
    ) -> None:
        self.config = config
        self.protected_token_ids = protected_token_ids
        self.counters = counters
        self.num_speculative_tokens = counters.layout.num_speculative_tokens
        self.returned: list[Returned] = []
        self._protected: Protected | None = None

    def terms(self, logits: torch.Tensor) -> Terms:
        """The terms on logits of this width.

        The mask of the protected tokens is built on the first call, because only the logits tell
        how wide the model's output is.
        """
        vocab = logits.shape[1]
        if self._protected is None or self._protected.mask.shape[0] != vocab:
            mask = torch.zeros(vocab, dtype=torch.bool)
            mask[[token for token in self.protected_token_ids if token < vocab]] = True
            self._protected = Protected.of(mask, logits.device)
        return Terms(self.config.rule, self._protected)

    def account(self, batch: int, device: torch.device, returns: dict[int, str]) -> Account:
        """Where a step of so many requests is written down, with a table if any `returns`."""
        table = None
        if returns or self.config.logprobs == "sampled":
            table = torch.empty((batch, 2, self.num_speculative_tokens + 1), device=device)
        if table is not None and returns:
            self.returned.append(Returned(returns, table))
        return Account(self.counters.device_counts, table)

    def log_start(self, logger: Logger, runner: str) -> None:
        """Logs once, on the first tensor-parallel rank, what verification this engine does."""
        from vllm.distributed import get_tensor_model_parallel_rank

        if get_tensor_model_parallel_rank() != 0:
            return
        logger.info(
            "Margin-aware verification (MARS) is on: %s, %d protected tokens, model runner %s; %s",
            self.describe(),
            len(self.protected_token_ids),
            runner,
            self._loss(),
        )

    def describe(self) -> str:
        """The rule and the bound, as options."""
        config = self.config
        unit = " nats per token" if config.rule.in_nats else ""
        rule = f"{config.rule.option}={config.value:g}{unit}"
        if config.sets_price:
            rule = "the bound sets the price"
        bound = "no mars_max_loss"
        if config.max_loss is not None:
            bound = f"mars_max_loss={config.max_loss:g} nats per token"
        if config.limit is not None:
            bound += f", mars_limit={config.limit:g}"
        scope = "" if config.scope == "all" else f", mars_scope={config.scope}"
        return f"{rule}, {bound}, mars_strict_opening={config.opening}{scope}"

    def _loss(self) -> str:
        if self.config.lossy:
            return "the output is LOSSY: it can differ from the target's own."
        if self.config.clients_may_relax:
            return "the output is lossless (strict) unless a request chooses otherwise."
        return "the output is lossless (strict)."


def log_ratios(table: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """log m - log p of a step's tokens: 0 of greedy requests, and behind the last token.

    Args:
        table: float32 `[batch, 2, width]`: see `Account`.
        temperature: `[batch]`; 0 is greedy.
    """
    return table[:, 0].nan_to_num(0.0).masked_fill(temperature[:, None] == 0, 0.0)


def of_sampled(token_ids: torch.Tensor, ratios: torch.Tensor) -> torch.Tensor:
    """What is added to logprobs, so that they are log m of the sampled token in every column.

    Args:
        token_ids: `[rows, columns]`, first the sampled token; the same one may come again.
        ratios: `[rows]`: see `log_ratios`.
    """
    return torch.where(token_ids == token_ids[:, :1], ratios[:, None], 0.0)


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
