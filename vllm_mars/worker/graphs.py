"""The head and the verification of a step of Model Runner V2 as one CUDA graph.

vLLM replays its target as a graph, which leaves the hidden states in a buffer that never moves. A
graph of ours goes on there: `compute_logits`, and all kernels of the verification. There is one for
each size that vLLM captures decodes of, where all requests have K drafts, for greedy steps and for
those that sample. Slots of -1 fill a batch up. All else is verified as without graphs: prompts,
shorter drafts, a grammar, requests that ask for more than tokens or whose logits something changes.
"""

from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_mars.kernels.account.naive import Account
from vllm_mars.worker.requests_v2 import BatchRows, BySlot


class VerificationGraphs:
    """The graphs of one runner.

    Args:
        runner: vLLM's V2 `GPUModelRunner`. Its `capture_model` and `sample` are wrapped, on this
            instance alone; its samplers are looked up at each use, since vLLM makes new ones.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._width = runner.speculative_config.num_speculative_tokens + 1
        # By whether requests sample.
        self._managers: dict[bool, CudaGraphManager] = {}
        capture_model, sample = runner.capture_model, runner.sample

        def capture_and_drop(*, profile_only: bool = False) -> Any:
            size = capture_model(profile_only=profile_only)
            # vLLM throws away what it has captured to measure memory.
            if profile_only:
                self._managers.clear()
            return size

        def sample_by_graph(hidden_states: torch.Tensor, batch: Any, grammar: Any) -> Any:
            found = self._find(hidden_states, batch, grammar)
            if found is None:
                return sample(hidden_states, batch, grammar)
            output = self._replay(*found, batch)
            return output, output.num_sampled, output.num_rejected

        runner.capture_model, runner.sample = capture_and_drop, sample_by_graph

    def follow(self, model_state: Any) -> None:
        """Captures when vLLM does, with a model that has just been loaded.

        Its `capture_inner_cudagraphs`, which vLLM calls between the captures of target and drafter,
        is wrapped, on this instance alone.
        """
        self._managers.clear()
        capture_inner = model_state.capture_inner_cudagraphs

        def capture_and_verification(*args: Any, **kwargs: Any) -> None:
            capture_inner(*args, **kwargs)
            self._capture()

        model_state.capture_inner_cudagraphs = capture_and_verification

    def _capture(self) -> None:
        runner, sampler, width = self._runner, self._runner.sampler, self._width
        self._managers.clear()
        # None where vLLM captures no whole target.
        self._hidden = runner.cudagraph_manager.hidden_states
        if (
            self._hidden is None
            or runner.decode_query_len != width
            or runner.speculative_config.uses_dynamic_speculative_decoding()
            or any((runner.lora_config, runner.batch_sharder, runner.adaptive_verification))
            or any((sampler.compute_nans, sampler.return_sampling_mask))
        ):
            return
        most, ids = runner.max_num_reqs, {"dtype": torch.int32, "device": runner.device}
        self._slots = torch.full((most,), -1, dtype=torch.int64, device=runner.device)
        self._row_slots = self._slots.repeat_interleave(width)
        self._places = torch.arange(width, **ids).repeat(most)
        self._ends = torch.arange(1, most + 1, **ids) * width
        self._out = torch.zeros(most * (2 * width + 2), **ids)
        total_len, *others = runner.rejection_sampler.requests.by_slot(sampler.sampling_states)
        self._by_slot, self._num_added = BySlot(total_len, *(it.clone() for it in others)), -1
        for samples in (False, True):
            given = runner.vllm_config, runner.device, CUDAGraphMode.FULL_DECODE_ONLY, width
            manager = self._managers[samples] = CudaGraphManager(*given)
            # At slots of -1 neither a capture nor vLLM's call in front of it changes anything.
            manager.capture(lambda desc, warmup, of=samples: lambda mode: self._run(desc, of))

    def _run(self, desc: Any, samples: bool) -> None:
        runner, verifier = self._runner, self._runner.rejection_sampler
        batch, num_rows, buffers = desc.num_reqs, desc.num_tokens, runner.input_buffers
        logits = runner.model.compute_logits(self._hidden[:num_rows])
        self._row_slots[:num_rows].view(batch, -1).copy_(self._slots[:batch, None])
        rows = BatchRows(
            *(buffers.input_ids[:num_rows], self._ends[:batch], self._slots[:batch]),
            *(buffers.positions[:num_rows], self._row_slots[:num_rows], self._places[:num_rows]),
        )
        account = Account(verifier.reports.counters.device_counts, None)
        given = logits, runner.speculator.draft_logits, rows, self._by_slot, samples
        output = verifier.verify(*given, account)
        found = output.output_token_ids, output.num_emitted, self._width - output.num_emitted
        for part, value in zip(self._parts(self._out, batch), found, strict=True):
            part.copy_(value)

    def _parts(self, out: torch.Tensor, batch: int) -> tuple[torch.Tensor, ...]:
        """Tokens int64 `[batch, K + 1]`, how many count, and rejected drafts, int32 `[batch]`."""
        end = 2 * batch * self._width
        tokens = out[:end].view(torch.int64).view(batch, self._width)
        return tokens, out[end : end + batch], out[end + batch : end + 2 * batch]

    def _find(self, hidden: torch.Tensor, batch: Any, grammar: Any) -> tuple[Any, Any] | None:
        """Where the graph of a step is."""
        num_reqs, width, slots = batch.num_reqs, self._width, batch.idx_mapping_np
        sampler, requests = self._runner.sampler, self._runner.rejection_sampler.requests
        is_plain = (
            self._managers
            and grammar is None
            and not batch.has_prefill
            and batch.num_draft_tokens == num_reqs * (width - 1)
            and batch.num_tokens == num_reqs * width
            and hidden.data_ptr() == self._hidden.data_ptr()
            and not (requests.asks[slots] | sampler.needs_logits_processing[slots]).any()
        )
        if is_plain:
            manager = self._managers[bool(sampler.sampling_states.temperature.np[slots].any())]
            desc = manager.dispatch(num_reqs, num_reqs * width, width, 0)
            if desc.cg_mode == CUDAGraphMode.FULL:
                return manager, desc
        return None

    def _replay(self, manager: CudaGraphManager, desc: Any, batch: Any) -> SamplerOutput:
        requests, num_reqs = self._runner.rejection_sampler.requests, batch.num_reqs
        # What lies somewhere else in each step changes where requests come.
        if self._num_added != requests.num_added:
            self._num_added = requests.num_added
            now = requests.by_slot(self._runner.sampler.sampling_states)
            for own, other in zip(self._by_slot[1:], now[1:], strict=True):
                own.copy_(other)
        self._slots[:num_reqs].copy_(batch.idx_mapping)
        self._slots[num_reqs : desc.num_reqs].fill_(-1)
        manager.run_fullgraph(desc)
        found = self._parts(self._out.clone(), desc.num_reqs)
        tokens, num_sampled, num_rejected = (each[:num_reqs] for each in found)
        return SamplerOutput(tokens, None, None, num_sampled, num_rejected)
