"""What V2 draws probabilistic drafts from: their requests' sampling parameters and seeds.

vLLM draws them by the temperature alone. Here they are drawn under penalties, top-k and top-p as
well, for which the tokens of the draft so far count, and at a share of the temperature. The
verification is lossless for any draft distribution that it is given: vLLM keeps the logits that
were drawn from, in their dtype, and they are divided by the same number again. A greedy request's
temperature, 0, stays what it is.

vLLM's speculators look for a watermark before they draw, and have it draw if there is one. MARS
serves no watermark, so a `DraftSampler` can stand in its place for as long as a draft is drawn of
such requests: it applies their parameters to the logits, in place, and then draws as vLLM does. So
vLLM keeps the logits that were drawn from, for verification.

vLLM draws within its CUDA graphs of the draft. They are captured twice, without and with the
parameters, so that a batch whose requests have none launches what it always did.

A draft step with parameters launches beside the draw, for rows [n, V]:

    slots and parameters of the rows          2, a few numbers
    drafted tokens counted, and taken off     2, a few numbers
    vLLM's penalties                          1; of rows with penalties the logits, their counts
    logits / temperature                      1, float32
    vLLM's top-k and top-p                    2, or 9 up to 64 rows
    what they cut, in the logits              2
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.sample.ops import topk_topp_triton
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.penalties import apply_penalties

from vllm_mars.kernels.drafted.fused import count_drafted
from vllm_mars.options.config import MarsConfig
from vllm_mars.releases import draws_anew
from vllm_mars.worker.draft_temperature import is_scaled, said_by
from vllm_mars.worker.requests_v2 import Asks, RequestsV2

# A member of a flag takes the host a microsecond.
_DRAFTS = int(Asks.DRAFTS)

# Before the name of a speculator's graph manager, that of the graphs with parameters. vLLM looks
# through the speculator's attributes for managers to drop after it has measured their memory.
_WITH = "vllm_mars_with_parameters_"


def wrap_speculator(runner: Any, config: MarsConfig, requests: RequestsV2) -> bool:
    """Lets the speculator of a V2 runner draw by its requests' sampling parameters.

    vLLM draws by seed and position. Verified by blocks, a draft stays or not by the numbers of all
    its positions, so the next step must not meet them again. Where vLLM does not see to that, the
    seeds given to the speculator change with each step.

    Args:
        runner: vLLM's V2 `GPUModelRunner`. If its speculator draws, `propose`, which copies
            temperatures and seeds to where its CUDA graphs read them, is wrapped, on this instance
            alone: it is given those that the requests keep, and while a request has parameters a
            `DraftSampler` draws.
        config: the options.
        requests: of the runner.

    Returns:
        Whether seeds are to change with each step.

    Raises:
        RuntimeError: the option is given, but this speculator draws nothing; or it does not say.
    """
    speculator = runner.speculator
    draws = said_by(speculator, "draft_logits") is not None
    scales = is_scaled(draws, speculator, config)
    if not draws:
        return False
    seeds_change = not draws_anew()
    propose = speculator.propose
    names = list(inspect.signature(propose).parameters)
    places = {names.index("temperature"): "temperature"} if scales or seeds_change else {}
    if seeds_change:
        places[names.index("seeds")] = "seeds"
    sampler = None
    # Those that choose among a few candidates have a draw of their own.
    if not hasattr(speculator, "candidate_sampler"):
        said_by(speculator, "draft_watermarker")
        sampler = DraftSampler(runner, requests)

    def propose_anew(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        # By place in a step, by name in vLLM's dummy run.
        for (place, name), own in zip(places.items(), requests.drawn_with, strict=False):
            if place < len(given):
                given[place] = own
            else:
                kwargs[name] = own
        batch = given[0] if given else kwargs["input_batch"]
        # Where vLLM measures its memory all is launched that may be.
        if sampler and (kwargs.get("is_profile") or requests.asks(batch.idx_mapping_np) & _DRAFTS):
            with sampler.stands_in():
                return propose(*given, **kwargs)
        return propose(*given, **kwargs)

    speculator.propose = propose_anew
    return seeds_change


class DraftSampler:
    """Draws the drafts of one V2 runner under sampling parameters.

    Args:
        runner: vLLM's. The `init_cudagraph_manager` and `capture` of its speculator are wrapped, on
            this instance alone.
        requests: of the runner.
    """

    def __init__(self, runner: Any, requests: RequestsV2) -> None:
        self._runner, self._requests = runner, requests
        self._speculator = speculator = runner.speculator
        # Names of the speculator's attributes that hold its graphs.
        self._managers: list[str] = []
        # While graphs are captured: the scratch buffers of vLLM's kernels that they hold.
        self._captures, self._scratch = False, dict[int, Any]()
        init, capture = speculator.init_cudagraph_manager, speculator.capture

        def init_twice(*args: Any, **kwargs: Any) -> None:
            init(*args, **kwargs)
            managers = {
                name: value
                for name, value in vars(speculator).items()
                if isinstance(value, CudaGraphManager) and not name.startswith(_WITH)
            }
            init(*args, **kwargs)
            for name, manager in managers.items():
                setattr(speculator, _WITH + name, getattr(speculator, name))
                setattr(speculator, name, manager)
            self._managers = list(managers)

        def capture_twice() -> None:
            capture()
            self._captures = True
            with self.stands_in():
                capture()
            self._captures = False

        speculator.init_cudagraph_manager, speculator.capture = init_twice, capture_twice

    @contextlib.contextmanager
    def stands_in(self) -> Iterator[None]:
        """Draws what the speculator drafts meanwhile, by graphs of its own."""
        self._exchange_graphs()
        self._speculator.draft_watermarker = self
        try:
            yield
        finally:
            self._speculator.draft_watermarker = None
            self._exchange_graphs()

    def _exchange_graphs(self) -> None:
        own = vars(self._speculator)
        for name in self._managers:
            own[name], own[_WITH + name] = own[_WITH + name], own[name]

    def sample(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        *args: Any,
        logits_cache_col: torch.Tensor,
        num_steps: int = 1,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As vLLM's `DraftWatermarker.sample` and `gumbel_sample`.

        Args:
            logits: `[rows, vocab]`, written.
            idx_mapping: slot of each row, -1 for none.
            logits_cache_col: the draft step, of all rows or of each.
            num_steps: tokens of a request that are drawn at once.
            args, kwargs: further ones of `gumbel_sample`.
        """
        self.apply_parameters(logits, idx_mapping.contiguous(), logits_cache_col)
        drawn: torch.Tensor = gumbel_sample(
            logits, idx_mapping, *args, logits_cache_col=logits_cache_col, **kwargs
        )
        return drawn

    def apply_parameters(
        self, logits: torch.Tensor, slots: torch.Tensor, step: torch.Tensor
    ) -> None:
        """Applies penalties, top-k and top-p; arguments as of `sample`."""
        states = self._runner.sampler.penalties_state
        counts, tokens = states.output_bin_counts, self._speculator.draft_tokens
        own = slots.clamp(min=0)
        parameters = self._requests.draft_parameters
        # Tokens that are drawn at once do not know each other.
        in_turn = not step.dim()
        if in_turn:
            count_drafted(counts, slots, tokens, step, 1)
        apply_penalties(
            logits[:, : counts.shape[1]],
            own,
            # Of the tokens of a request's rows none comes before another.
            slots,
            torch.zeros_like(slots),
            parameters.repetition,
            parameters.frequency,
            parameters.presence,
            states.prompt_bin_mask,
            counts,
        )
        if in_turn:
            count_drafted(counts, slots, tokens, step, -1)
        divisor, top_k, top_p = parameters.table[:3].index_select(1, own)
        cut = apply_top_k_top_p(logits / divisor[:, None], top_k, top_p)
        logits.masked_fill_(cut == -torch.inf, -torch.inf)
        if self._captures:
            # vLLM lets go of them when it needs larger ones, but the graphs go on writing there.
            for cache in (
                topk_topp_triton._TRITON_BUFFER_CACHE,
                topk_topp_triton._TRITON_TABLE_CACHE,
                topk_topp_triton._TRITON_SPLIT_CACHE,
            ):
                self._scratch |= {id(own): own for own in cache.values()}
