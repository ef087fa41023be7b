"""Every symbol of vLLM that this project uses, and how: the one list, without any code.

`vllm_mars.engine.compat` holds the installed vLLM against it, and tests/engine/test_interfaces.py
our own sources, in both directions. Nothing of vLLM is imported here.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple


class Use(NamedTuple):
    """How this project uses a symbol of vLLM.

    Attributes:
        name: within its module, with dots for members of a class.
        how: "override": a method of ours replaces it, so the parameters must be exactly these.
            "call": these are passed, so they must exist and the others must have defaults.
            "wrap": these are read from a call of vLLM's own; the others do not matter.
            "read": an attribute, a class or a module, which must exist.
        parameters: names without self, as in a signature: "positional, positional, *, keyword".
    """

    name: str
    how: Literal["override", "call", "wrap", "read"] = "read"
    parameters: str = ""


# The uses of each module's symbols.
Interfaces = Mapping[str, Sequence[Use]]


def _read(owner: str, *names: str) -> list[Use]:
    return [Use(f"{owner}.{name}") for name in names]


def _tells(owner: str, method: str, parameters: str = "request, result_generator") -> list[Use]:
    return [Use(f"{owner}.{method}", "wrap", parameters), Use(f"{owner}.engine_client")]


_LOGGER: Interfaces = {"vllm.logger": [Use("init_logger", "call", "name")]}
_TOKENIZER: Interfaces = {
    "vllm.tokenizers": [Use("cached_tokenizer_from_config", "call", "model_config")]
}
_PARAMETERS: Interfaces = {
    "vllm.sampling_params": _read(
        *("SamplingParams", "eos_token_id", "extra_args", "max_tokens", "stop_token_ids"),
        *("structured_outputs", "temperature"),
    )
}
_SPECULATION: Interfaces = {
    "vllm.config.speculative": _read(
        "SpeculativeConfig", "draft_sample_method", "num_speculative_tokens"
    )
}
# All that both runners need.
_RUNNER: Interfaces = {
    **_LOGGER,
    **_TOKENIZER,
    **_PARAMETERS,
    **_SPECULATION,
    "vllm.config.model": [
        Use("ModelConfig.hf_text_config"),
        Use("ModelConfig.try_get_generation_config", "call"),
    ],
    "vllm.config.parallel": [Use("ParallelConfig.distributed_executor_backend")],
    "vllm.config.vllm": _read("VllmConfig", "additional_config", "parallel_config"),
    "vllm.distributed": [Use("get_tensor_model_parallel_rank", "call")],
}
# What a runner returns, to which its counts are attached.
_OUTPUTS = [
    Use("AsyncModelRunnerOutput.get_output", "call"),
    Use("EMPTY_MODEL_RUNNER_OUTPUT"),
    *_read("LogprobsTensors", "logprob_token_ids", "logprobs"),
    Use("ModelRunnerOutput.req_ids"),
]

INTERFACES: Mapping[str, Interfaces] = {
    # The front end, which reads the options; it has loaded these modules by then.
    "options": {
        **_LOGGER,
        "vllm": [Use("__version__")],
        "vllm.config.model": [Use("ModelConfig.get_vocab_size", "call")],
        "vllm.config.vllm": [Use("VllmConfig.additional_config")],
        "vllm.engine.arg_utils": [
            Use("EngineArgs.create_speculative_config", "wrap", "target_model_config"),
            Use("EngineArgs.from_cli_args", "wrap", "args"),
            *_read(
                *("EngineArgs", "additional_config", "enable_batch_sharded_sampling"),
                *("logprobs_mode", "reasoning_config", "reasoning_parser", "speculative_config"),
                "watermark_config",
            ),
        ],
        "vllm.platforms": [Use("current_platform")],
        "vllm.platforms.interface": [
            Use("Platform.device_name"),
            Use("Platform.is_cpu", "call"),
            Use("Platform.is_cuda_alike", "call"),
            Use("Platform.is_xpu", "call"),
        ],
        # Hooked when they are imported, so a hook on a module that is gone would never run. These
        # are looked for, not imported.
        "vllm.v1.core.sched": [Use("scheduler")],
        "vllm.entrypoints.openai.chat_completion": [Use("serving")],
        "vllm.entrypoints.openai.completion": [Use("serving")],
        "vllm.entrypoints.scale_out.token_in_token_out": [Use("serving")],
        "vllm.v1.engine": [Use("async_llm"), Use("input_processor"), Use("output_processor")],
        "vllm.v1.metrics": [Use("loggers"), Use("stats")],
        "vllm.v1.executor": [Use("abstract")],
        "vllm.v1.worker": [Use("gpu_model_runner")],
        "vllm.v1.worker.gpu": [Use("model_runner")],
    },
    # The front end again, where markers are named by a parser or by their text.
    "markers": {
        **_LOGGER,
        **_TOKENIZER,
        "vllm.config.reasoning": [
            Use(
                *("ReasoningConfig", "call"),
                "*, reasoning_parser, reasoning_start_str, reasoning_end_str",
            ),
            Use("ReasoningConfig.initialize_token_ids", "call", "model_config"),
            *_read(
                *("ReasoningConfig", "natural_reasoning_end_token_ids", "reasoning_end_str"),
                *("reasoning_parser", "reasoning_start_str", "reasoning_start_token_ids"),
            ),
        ],
        "vllm.tool_parsers": [Use("ToolParserManager")],
        "vllm.tool_parsers.abstract_tool_parser": [
            Use("ToolParserManager.get_tool_parser", "call", "name")
        ],
    },
    # The front end, which checks each request's own options.
    "requests": {
        **_PARAMETERS,
        "vllm.exceptions": [Use("VLLMValidationError", "call", "message, *, parameter")],
        "vllm.v1.engine": [Use("EngineCoreRequest.sampling_params")],
        "vllm.v1.engine.async_llm": [
            Use("AsyncLLM.generate", "wrap", "prompt, sampling_params"),
            Use("AsyncLLM.vllm_config"),
        ],
        "vllm.v1.engine.input_processor": [
            Use("InputProcessor.__init__", "wrap"),
            Use("InputProcessor._validate_params", "wrap", "params"),
            Use("InputProcessor.process_inputs", "wrap"),
            Use("InputProcessor.vllm_config"),
        ],
    },
    # The engine core, where the counts pass through.
    "scheduler": {
        "vllm.v1.core.sched.scheduler": [
            Use("Scheduler.__init__", "wrap"),
            Use("Scheduler.make_stats", "wrap"),
            Use("Scheduler.update_from_output", "wrap", "scheduler_output, model_runner_output"),
            Use("Scheduler.vllm_config"),
        ],
        "vllm.v1.metrics.stats": [Use("SchedulerStats")],
    },
    # The engine core, which collects what a request wants to know.
    "return": {
        **_PARAMETERS,
        **_SPECULATION,
        "vllm.config.vllm": [Use("VllmConfig.speculative_config")],
        "vllm.v1.core.sched.scheduler": [
            Use("Scheduler.add_request", "wrap", "request"),
            Use("Scheduler.requests"),
        ],
        "vllm.v1.metrics.stats": [
            Use("RequestSpecDecodeMetrics.new", "call", "num_spec_tokens"),
            *_read("RequestSpecDecodeMetrics", "per_step_accepted", "per_step_drafted"),
        ],
        "vllm.v1.request": _read("Request", "request_id", "sampling_params", "spec_decode_metrics"),
        "vllm.v1.engine": [
            *_read("EngineCoreOutput", "new_token_ids", "request_id", "spec_decode_metrics"),
            Use("EngineCoreOutputs.outputs"),
        ],
        "vllm.v1.engine.detokenizer": [Use("IncrementalDetokenizer.num_output_tokens", "call")],
        "vllm.v1.engine.output_processor": _read(
            "RequestState", "detokenizer", "spec_decode_metrics"
        ),
    },
    # The server, which adds it to its responses.
    "answers": {
        "vllm.entrypoints.generate.base.protocol": [Use("PerRequestMetrics", "call")],
        "vllm.entrypoints.openai.chat_completion.serving": [
            *_tells("OpenAIServingChat", "chat_completion_full_generator"),
            *_tells("OpenAIServingChat", "chat_completion_stream_generator"),
        ],
        "vllm.entrypoints.openai.completion.serving": [
            *_tells(
                *("OpenAIServingCompletion", "completion_stream_generator"),
                "request, engine_inputs, result_generator",
            ),
            *_tells(
                *("OpenAIServingCompletion", "request_output_to_completion_response"),
                "final_res_batch, request",
            ),
        ],
        "vllm.entrypoints.scale_out.token_in_token_out.serving": [
            *_tells("ServingTokens", "serve_tokens_full_generator"),
            *_tells("ServingTokens", "serve_tokens_stream_generator"),
        ],
    },
    # The front end, which exports and logs them.
    "metrics": {
        **_LOGGER,
        "vllm.config.speculative": [Use("SpeculativeConfig.num_speculative_tokens")],
        "vllm.config.vllm": [Use("VllmConfig.speculative_config")],
        "vllm.v1.metrics.loggers": [
            Use("LoggingStatLogger.__init__", "wrap", "vllm_config"),
            Use("LoggingStatLogger.log", "wrap"),
            Use("LoggingStatLogger.record", "wrap", "scheduler_stats, iteration_stats"),
            *_read("LoggingStatLogger", "log_prefix", "vllm_config"),
            Use("PrometheusStatLogger.__init__", "wrap", "vllm_config"),
            Use("PrometheusStatLogger.record", "wrap", "scheduler_stats"),
            *_read(
                *("PrometheusStatLogger", "_counter_cls", "_gauge_cls", "_histogram_cls"),
                *("per_engine_labelvalues", "vllm_config"),
            ),
        ],
        "vllm.v1.metrics.stats": [Use("IterationStats.num_generation_tokens")],
    },
    # The engine core, which asks every worker what it verifies with.
    "executor": {
        "vllm.config.parallel": [Use("ParallelConfig.node_rank_within_dp")],
        "vllm.v1.executor.abstract": [
            Use("Executor.__init__", "wrap"),
            Use("Executor.collective_rpc", "call", "method"),
            Use("Executor.shutdown", "call"),
            *_read("Executor", "parallel_config", "vllm_config"),
        ],
        "vllm.v1.worker.worker_base": _read("WorkerBase", "model_runner", "rank"),
    },
    "V1": {
        **_RUNNER,
        "vllm": [Use("SamplingParams")],
        "vllm.platforms": [Use("current_platform")],
        "vllm.v1.outputs": [
            *_OUTPUTS,
            Use("SamplerOutput", "call", "*, sampled_token_ids, logprobs_tensors"),
            *_read("SamplerOutput", "sampled_token_ids", "logprobs_tensors"),
        ],
        "vllm.v1.sample.logits_processor.builtin": [
            Use("LogitBiasLogitsProcessor.biases"),
            Use("MinTokensLogitsProcessor.min_toks"),
            Use("process_dict_updates", "call", "req_entries, batch_update, new_state"),
        ],
        "vllm.v1.sample.logits_processor.interface": [
            Use("BatchUpdate"),
            Use("LogitsProcessor.apply", "override", "logits"),
            Use("LogitsProcessor.is_argmax_invariant", "override"),
            Use("LogitsProcessor.update_state", "override", "batch_update"),
        ],
        "vllm.v1.sample.logits_processor.state": _read(
            "LogitsProcessors", "argmax_invariant", "non_argmax_invariant"
        ),
        "vllm.v1.sample.metadata": _read(
            *("SamplingMetadata", "all_greedy", "allowed_token_ids_mask", "bad_words_token_ids"),
            *("logitsprocs", "logprob_token_ids", "max_num_logprobs", "no_penalties"),
            *("temperature", "thinking_budget_state_holder"),
        ),
        "vllm.v1.sample.rejection_sampler": [
            Use("RejectionSampler.__init__", "call", "sampler, spec_config, device"),
            Use(
                *("RejectionSampler.forward", "override"),
                "metadata, draft_probs, logits, sampling_metadata",
            ),
            Use(
                *("RejectionSampler.apply_logits_processors", "call"),
                "logits, sampling_metadata, metadata",
            ),
            *_read(
                *("RejectionSampler", "sampler", "is_logits_logprobs_mode"),
                *("is_processed_logprobs_mode", "use_fp64_gumbel"),
            ),
            Use(
                *("apply_sampling_constraints", "call"),
                "logits, cu_num_draft_tokens, sampling_metadata",
            ),
            Use(
                *("rejection_sample", "call"),
                "draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, "
                "draft_probs, target_logits, bonus_token_ids, sampling_metadata, *, "
                "use_fp64_gumbel",
            ),
        ],
        "vllm.v1.sample.sampler": [
            Use("Sampler.compute_logprobs", "call", "logits"),
            Use("Sampler.gather_logprobs", "call", "logprobs, num_logprobs, token_ids"),
            Use(
                *("Sampler.forward", "call"),
                "*, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override",
            ),
        ],
        "vllm.v1.sample.thinking_budget_state": [
            Use("ThinkingBudgetStateHolder.has_tracked_requests", "call")
        ],
        "vllm.v1.spec_decode.llm_base_proposer": [
            Use(
                *("SpecDecodeBaseProposer._sample_from_logits", "wrap"),
                "logits, sampling_metadata",
            ),
            Use("SpecDecodeBaseProposer._enable_probabilistic_draft_probs"),
        ],
        "vllm.v1.spec_decode.metadata": _read(
            *("SpecDecodeMetadata", "bonus_logits_indices", "cu_num_draft_tokens"),
            *(
                "cu_num_sampled_tokens",
                "draft_token_ids",
                "max_spec_len",
                "num_draft_tokens",
                "target_logits_indices",
            ),
        ),
        "vllm.v1.worker.gpu_input_batch": _read(
            "InputBatch", "generators", "logitsprocs", "num_reqs", "req_ids"
        ),
        "vllm.v1.worker.gpu_model_runner": [
            Use("AsyncGPUModelRunnerOutput._model_runner_output"),
            Use("GPUModelRunner.__init__", "wrap"),
            Use("GPUModelRunner.execute_model", "wrap"),
            Use("GPUModelRunner.sample_tokens", "wrap"),
            *_read(
                *("GPUModelRunner", "device", "discard_request_mask", "drafter", "input_batch"),
                *("max_model_len", "max_num_reqs", "model_config", "rejection_sampler"),
                *("requests", "speculative_config", "vllm_config"),
            ),
        ],
    },
    "V2": {
        **_RUNNER,
        "vllm.v1.outputs": _OUTPUTS,
        "vllm.v1.worker.gpu.async_utils": [
            Use("AsyncOutput.model_runner_output"),
            Use("stream", "call", "to_stream, from_stream"),
        ],
        "vllm.v1.worker.gpu.buffer_utils": [
            Use("StagedWriteTensor.gpu"),
            *_read("UvaBackedTensor", "gpu", "np"),
        ],
        "vllm.v1.worker.gpu.model_runner": [
            Use("GPUModelRunner.__init__", "wrap"),
            Use("GPUModelRunner.execute_model", "wrap"),
            Use("GPUModelRunner.finish_requests", "wrap", "scheduler_output"),
            Use("GPUModelRunner.load_model", "wrap"),
            Use("GPUModelRunner.sample_tokens", "wrap"),
            *_read(
                *("GPUModelRunner", "device", "main_stream", "max_num_reqs", "max_num_tokens"),
                *(
                    "model_config",
                    "output_copy_stream",
                    "rejection_sampler",
                    "req_states",
                    "sampler",
                ),
                *("speculative_config", "speculator", "vllm_config", "vocab_size"),
            ),
        ],
        "vllm.v1.worker.gpu.input_batch": [Use("InputBatch.idx_mapping_np")],
        "vllm.v1.core.sched.output": _read(
            "SchedulerOutput", "finished_req_ids", "preempted_req_ids"
        ),
        "vllm.v1.worker.gpu.states": [
            Use("RequestState.add_request", "wrap", "req_id, prompt_len, all_token_ids"),
            *_read(
                *("RequestState", "all_token_ids", "device", "index_to_req_id", "max_model_len"),
                *("max_num_reqs", "prompt_len", "req_id_to_index", "total_len"),
            ),
        ],
        "vllm.v1.worker.gpu.sample.logits_processor.interface": [
            Use("LogitsContext"),
            Use("LogitsProcessor.add_request", "override", "req_idx, sampling_params"),
            Use("LogitsProcessor.apply", "override", "logits, ctx"),
            Use("LogitsProcessor.apply_staged_writes", "override"),
        ],
        "vllm.v1.worker.gpu.sample.logprob": [
            Use("LogprobTokenIdsState.max_num_token_ids", "call", "idx_mapping_np"),
            Use(
                *("compute_topk_scores", "call"),
                "logits, num_logprobs, sampled_token_ids, cu_num_logits, *, "
                "logprob_token_ids_state, expanded_idx_mapping, max_per_req_token_ids, "
                "logits_mode",
            ),
        ],
        "vllm.v1.worker.gpu.sample.sampler": [
            Use(
                *("Sampler.apply_sampling_params", "call"),
                "logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, "
                "expanded_local_pos, seq_lens_upper_bound_np",
            ),
            *_read(
                *("Sampler", "logits_processors", "logprob_token_ids_state", "logprobs_mode"),
                *("sampling_states", "use_fp64_gumbel"),
            ),
        ],
        "vllm.v1.worker.gpu.sample.gumbel": [Use("gumbel_noised_argmax")],
        "vllm.v1.worker.gpu.sample.states": _read("SamplingStates", "seeds", "temperature"),
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler": [
            Use("RejectionSampler.__init__", "call", "sampler, spec_config, device"),
            Use(
                *("RejectionSampler.__call__", "override"),
                "logits, input_batch, draft_logits, invalid_drafts",
            ),
            Use(
                *("RejectionSampler._verify", "override"),
                "logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, "
                "idx_mapping_np, expanded_idx_mapping, expanded_local_pos, "
                "seq_lens_upper_bound_np, verify_draft_sampled",
            ),
            Use(
                *("RejectionSampler._get_logprobs_tensors", "override"),
                "sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs",
            ),
            *_read("RejectionSampler", "num_speculative_steps", "sampler"),
        ],
        "vllm.v1.worker.gpu.spec_decode.speculator": [
            Use(
                *("BaseSpeculator.propose", "wrap"),
                "input_batch, attn_metadata, slot_mappings, last_hidden_states, "
                "aux_hidden_states, num_sampled, num_rejected, last_sampled, "
                "next_prefill_tokens, temperature",
            ),
            Use("DraftModelSpeculator.draft_logits"),
        ],
    },
    # vLLM's CPU kernels, which cpu_kernels.py mends.
    "cpu": {
        "vllm.triton_utils": [Use("HAS_TRITON")],
        "vllm.triton_utils.dispatcher": [Use("KernelOverride._impl")],
        "vllm.utils.cpu_triton_utils": [
            Use(
                *("_expand_kernel_impl", "wrap"),
                "output, input_val, cu_num_tokens, replace_from, replace_to",
            ),
            Use(
                *("_rejection_random_sample_kernel_impl", "wrap"),
                "output_token_ids, cu_num_draft_tokens, draft_token_ids, draft_probs, "
                "target_probs, bonus_token_ids, recovered_token_ids, uniform_probs",
            ),
        ],
        "vllm.v1.sample": [Use("rejection_sampler")],
        "vllm.v1.sample.rejection_sampler": [
            Use("expand_kernel"),
            Use("rejection_random_sample_kernel"),
        ],
    },
    # `python -m vllm_mars.vllm_cli`, which is vLLM's own command; checked by the tests alone.
    "command": {"vllm.entrypoints.cli.main": [Use("main", "call")]},
}
