"""The margin rule as one engine applies it, shared by the samplers of both model runners."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger

import torch

from vllm_mars.config import MarsConfig
from vllm_mars.verify import Backend, relaxed_positions, resolve_backend

# (theta, gap) of the comparison z2 > theta * z1 - gap: floats, or float32 [batch] each.
Thresholds = tuple[float, float] | tuple[torch.Tensor, torch.Tensor]


class MarginRule:
    """Thresholds and protected tokens of one engine.

    Args:
        config: the options.
        protected_token_ids: tokens at which verification stays strict.
        backend: as in `vllm_mars.verify_greedy`.
    """

    def __init__(
        self, config: MarsConfig, protected_token_ids: list[int], backend: Backend = "auto"
    ) -> None:
        self.config = config
        self.thresholds = config.thresholds
        self.protected_token_ids = protected_token_ids
        self.backend = backend
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

    @contextmanager
    def relaxed_made_certain(
        self,
        logits: torch.Tensor,
        draft_token_ids: torch.Tensor,
        cu_num_draft_tokens: torch.Tensor,
        thresholds: Thresholds,
    ) -> Iterator[None]:
        """Makes the draft token the target's certain choice where relaxed, within the context.

        A rejection sampler then accepts it: it is the argmax, and its probability is 1, so at least
        that of the draft. Positions that are not relaxed, the random numbers and the corrections
        stay as they are. On exit the logits are again what they were, so logprobs are the true
        ones.

        Args:
            logits: `[num_draft, vocab]` processed logits, changed in place.
            draft_token_ids: `[num_draft]`; ids outside the vocabulary are never relaxed.
            cu_num_draft_tokens: `[batch]` int32, inclusive prefix sum.
            thresholds: theta and gap of the batch or of each of its requests.
        """
        theta, gap = thresholds
        if not isinstance(theta, torch.Tensor) and (theta, gap) == (1, 0):
            yield
            return
        relaxed = relaxed_positions(
            logits,
            draft_token_ids,
            cu_num_draft_tokens,
            theta,
            gap=gap,
            protected=self.protected_mask(logits),
            backend=self.backend,
        )
        index = draft_token_ids.long().clamp(0, logits.shape[1] - 1)[:, None]
        true_logits = logits.gather(1, index)
        # The largest finite logit: its probability is exactly 1, and softmax meets no inf - inf.
        certain = torch.finfo(logits.dtype).max
        logits.scatter_(1, index, torch.where(relaxed[:, None], certain, true_logits))
        try:
            yield
        finally:
            logits.scatter_(1, index, true_logits)

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
