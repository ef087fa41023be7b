"""As much of a step of vLLM's Model Runner V2 as verification meets, for `launches` and for tests.

Before a step: the requests that end. In it: vLLM's `RejectionSampler.__call__`, and what the
speculator is called with. Of the model, the drafter and the copies of vLLM's own output there is
nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.step_v2 import Step, vllm_config


class Speculator:
    """Drafts nothing, without graphs. Its `propose` takes what vLLM's takes.

    Attributes:
        draft_logits: as in `Step`.
        given: temperatures and seeds of the last call.
    """

    draft_watermarker = None

    def __init__(self, draft_logits: Any) -> None:
        self.draft_logits = draft_logits
        self.given: tuple[Any, Any] | None = None

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Any,
        num_rejected: Any,
        last_sampled: Any,
        next_prefill_tokens: Any,
        temperature: Any,
        seeds: Any,
        **others: Any,
    ) -> None:
        """Notes what it draws with."""
        self.given = temperature, seeds

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing."""

    def capture(self) -> None:
        """Nothing."""


class RunnerV2:
    """Stands in for vLLM's `GPUModelRunner`, whose methods of these names it follows.

    Args:
        step: its inputs; all requests are in the batch.
        by: a `MarsConfig`, or one of vLLM's rejection sample methods.

    Attributes:
        sampled: what the sampler gave last.
    """

    def __init__(self, step: Step, by: Any) -> None:
        self._step, self._by = step, by
        self.device = step.logits.device
        self.vllm_config = vllm_config()
        self.model_config = SimpleNamespace(skip_tokenizer_init=True)
        self.speculative_config = step.spec_config(by if isinstance(by, str) else "standard")
        self.speculator = Speculator(step.draft_logits)
        self.req_states: Any = None
        self.sampled: Any = None
        self.load_model()
        self._begin()

    def _begin(self) -> None:
        """All requests come, and answer."""
        self._step.enter(self.sampler)
        self._step.answer(self.sampler)
        self._batch = self._step.batch()

    def load_model(self) -> None:
        """Makes the samplers anew, whose slots must be free."""
        from vllm_mars.worker.sampler_v2 import install

        step = self._step
        self.rejection_sampler = step.vllm_sampler(
            self.speculative_config.rejection_sample_method, self.req_states
        )
        self.sampler = self.rejection_sampler.sampler
        self.req_states = self.sampler.req_states
        if not isinstance(self._by, str):
            # There is no tokenizer, and no parallel group.
            config = replace(self._by, protected_token_ids=(2,))
            with mock.patch("vllm.distributed.get_tensor_model_parallel_rank", return_value=0):
                install(self, config)

    def reload(self) -> None:
        """As after a sleep: all requests end, the model is loaded again, and as many come."""
        self.finish_requests(_scheduled(self.req_states.req_id_to_index))
        self.load_model()
        self._begin()

    def step(self, finished: Sequence[str] = ()) -> None:
        """A step as the engine asks for it.

        Args:
            finished: ids of requests that have ended; others with the same ids come.
        """
        self.execute_model(_scheduled(finished))
        self.sample_tokens(None)

    def execute_model(self, scheduler_output: Any) -> None:
        """What comes before the model."""
        self.finish_requests(scheduler_output)
        if scheduler_output.finished_req_ids:
            self._step.enter(self.sampler, scheduler_output.finished_req_ids)
        # In each step, as vLLM does.
        self.sampler.apply_staged_writes()

    def finish_requests(self, scheduler_output: Any) -> None:
        """Frees the slots of requests."""
        for name in scheduler_output.finished_req_ids:
            self.req_states.remove_request(name)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """What comes behind the model; of vLLM's own output the object that is sent alone."""
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.gpu.async_utils import AsyncOutput

        batch, states = self._batch, self.req_states
        self.sampled = self.rejection_sampler(
            self._step.logits, batch, self.speculator.draft_logits, None
        )
        # Without the stream of its constructor.
        output = AsyncOutput.__new__(AsyncOutput)
        output.model_runner_output = ModelRunnerOutput(batch.req_ids, {})
        sampling = self.sampler.sampling_states
        self.speculator.propose(
            *(batch, None, None, None, None, self.sampled.num_sampled, self.sampled.num_rejected),
            *(states.last_sampled_tokens, states.next_prefill_tokens),
            *(sampling.temperature.gpu, sampling.seeds.gpu),
            num_speculative_tokens=self.speculative_config.num_speculative_tokens,
            dp_sync_state=None,
            mm_inputs=None,
        )
        return output


def _scheduled(finished: Iterable[str]) -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    scheduled = SchedulerOutput.make_empty()
    scheduled.finished_req_ids.update(finished)
    return scheduled
