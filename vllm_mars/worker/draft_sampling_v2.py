"""Samples V2's probabilistic drafts with their requests' sampling parameters and seeds.

vLLM applies only the temperature. Here penalties (which count the draft's tokens), top-k, top-p and
the draft temperature apply as well. Verification is lossless for any draft distribution: vLLM
caches the logits that were sampled from, and verification divides them by the same temperature.

vLLM's speculators let a `draft_watermarker` sample if there is one. MARS refuses watermarks, so a
`DraftSampler` takes that place while a batch needs it. vLLM's CUDA graphs of the draft are captured
twice, without and with it, so that a batch without such parameters launches the same kernels.
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
from vllm_mars.worker.draft_temperature import drafter_attribute, scales_temperature
from vllm_mars.worker.requests_v2 import RequestFeatures, RequestsV2

# As an int: reading a Flag member costs 1 us.
_DRAFTS = int(RequestFeatures.DRAFTS)

# Prefix for the attribute of a graph manager with parameters. It must be an attribute of the
# speculator, where vLLM finds the managers to drop after it has measured their memory.
_PREFIX = "vllm_mars_with_parameters_"


def wrap_speculator(runner: Any, config: MarsConfig, requests: RequestsV2) -> bool:
    """Makes a V2 runner's speculator use its requests' sampling parameters.

    Returns whether each step must give the drafter new seeds.
    """
    speculator = runner.speculator
    is_probabilistic = drafter_attribute(speculator, "draft_logits") is not None
    is_scaled = scales_temperature(is_probabilistic, speculator, config)
    if not is_probabilistic:
        return False
    # vLLM seeds drafts by request and position. In block verification acceptance depends on the
    # random numbers of all positions, so the next step must not reuse those of rejected ones.
    seeds_change = not draws_anew()
    # Copies temperatures and seeds to the inputs of the draft's CUDA graphs.
    propose = speculator.propose
    parameters = list(inspect.signature(propose).parameters)
    # Positions of the arguments that are replaced.
    positions: dict[str, int] = {}
    if is_scaled or seeds_change:
        positions["temperature"] = parameters.index("temperature")
    if seeds_change:
        positions["seeds"] = parameters.index("seeds")
    sampler = None
    # Speculators that choose among candidates sample with their kernel.
    if not hasattr(speculator, "candidate_sampler"):
        drafter_attribute(speculator, "draft_watermarker")
        sampler = DraftSampler(runner, requests)

    def propose_with_parameters(*args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        temperature, seeds = requests.draft_sampling
        values = {"temperature": temperature, "seeds": seeds}
        # vLLM passes them by position in a step, by name in its dummy run.
        for name, position in positions.items():
            if position < len(arguments):
                arguments[position] = values[name]
            else:
                kwargs[name] = values[name]
        batch = arguments[0] if arguments else kwargs["input_batch"]
        # Memory profiling must launch every kernel that a step may launch.
        if sampler and (
            kwargs.get("is_profile") or requests.features(batch.idx_mapping_np) & _DRAFTS
        ):
            with sampler.installed():
                return propose(*arguments, **kwargs)
        return propose(*arguments, **kwargs)

    speculator.propose = propose_with_parameters
    return seeds_change


class DraftSampler:
    """Samples drafts with penalties, top-k and top-p, in place of vLLM's `DraftWatermarker`.

    It wraps the speculator's `init_cudagraph_manager` and `capture`.
    """

    def __init__(self, runner: Any, requests: RequestsV2) -> None:
        self._runner = runner
        self._requests = requests
        speculator = runner.speculator
        self._speculator = speculator
        # Names of the speculator's attributes that hold its graph managers.
        self._managers: list[str] = []
        self._is_capturing = False
        # Scratch buffers of vLLM's kernels that captured graphs write to, by id.
        self._scratch: dict[int, Any] = {}
        init = speculator.init_cudagraph_manager
        capture = speculator.capture

        def init_twice(*args: Any, **kwargs: Any) -> None:
            init(*args, **kwargs)
            managers = {
                name: value
                for name, value in vars(speculator).items()
                if isinstance(value, CudaGraphManager) and not name.startswith(_PREFIX)
            }
            init(*args, **kwargs)
            for name, manager in managers.items():
                setattr(speculator, _PREFIX + name, getattr(speculator, name))
                setattr(speculator, name, manager)
            self._managers = list(managers)

        def capture_twice() -> None:
            capture()
            self._is_capturing = True
            with self.installed():
                capture()
            self._is_capturing = False

        speculator.init_cudagraph_manager = init_twice
        speculator.capture = capture_twice

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Makes the speculator sample by this object, with the second set of graphs."""
        self._exchange_graphs()
        self._speculator.draft_watermarker = self
        try:
            yield
        finally:
            self._speculator.draft_watermarker = None
            self._exchange_graphs()

    def _exchange_graphs(self) -> None:
        attributes = vars(self._speculator)
        for name in self._managers:
            other = _PREFIX + name
            attributes[name], attributes[other] = attributes[other], attributes[name]

    def sample(
        self,
        # [rows, vocab], modified in place
        logits: torch.Tensor,
        # [rows], slots, or -1
        idx_mapping: torch.Tensor,
        *args: Any,
        # Draft step; a scalar, or [rows] if a request's tokens are sampled in parallel.
        logits_cache_col: torch.Tensor,
        # Tokens per request that are sampled in parallel.
        num_steps: int = 1,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Samples draft tokens, as vLLM's `DraftWatermarker.sample` and `gumbel_sample`."""
        self._apply_parameters(logits, idx_mapping.contiguous(), logits_cache_col)
        token_ids: torch.Tensor = gumbel_sample(
            logits, idx_mapping, *args, logits_cache_col=logits_cache_col, **kwargs
        )
        return token_ids

    # Launches and the data that they move, for logits [n, V]:
    #     slots and parameters of the rows        2, a few numbers
    #     counting and uncounting drafted tokens  2, a few numbers
    #     vLLM's penalties                        1, logits and counts of rows with penalties
    #     logits / temperature                    1, float32
    #     vLLM's top-k and top-p                  2, or 9 up to 64 rows
    #     masking the logits                      2
    def _apply_parameters(
        self, logits: torch.Tensor, slots: torch.Tensor, step: torch.Tensor
    ) -> None:
        states = self._runner.sampler.penalties_state
        counts = states.output_bin_counts
        draft_tokens = self._speculator.draft_tokens
        parameters = self._requests.draft_parameters
        repetition, frequency, presence = parameters[3:]
        valid_slots = slots.clamp(min=0)
        # Tokens that are sampled in parallel do not depend on each other.
        is_sequential = step.dim() == 0
        if is_sequential:
            count_drafted(counts, slots, draft_tokens, step, by=1)
        apply_penalties(
            logits[:, : counts.shape[1]],
            expanded_idx_mapping=valid_slots,
            # At local position 0 no draft tokens before a row are counted, so any ids do.
            token_ids=slots,
            expanded_local_pos=torch.zeros_like(slots),
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
            prompt_bin_mask=states.prompt_bin_mask,
            output_bin_counts=counts,
        )
        if is_sequential:
            count_drafted(counts, slots, draft_tokens, step, by=-1)
        divisor, top_k, top_p = parameters[:3].index_select(1, valid_slots)
        masked = apply_top_k_top_p(logits / divisor[:, None], top_k, top_p)
        logits.masked_fill_(masked == -torch.inf, -torch.inf)
        if self._is_capturing:
            # vLLM frees its buffers when it needs larger ones, but the graphs still write to them.
            for cache in (
                topk_topp_triton._TRITON_BUFFER_CACHE,
                topk_topp_triton._TRITON_TABLE_CACHE,
                topk_topp_triton._TRITON_SPLIT_CACHE,
            ):
                self._scratch |= {id(buffer): buffer for buffer in cache.values()}
