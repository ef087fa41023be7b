"""Every symbol of vLLM that this project uses, and how: the one list, without any code.

`vllm_mars.engine.compat` holds the installed vLLM against it. Nothing of vLLM is imported here.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Touch(NamedTuple):
    """How this project uses a symbol of vLLM.

    Attributes:
        use: "override": a method of ours replaces it, so the parameters must be exactly these.
            "call": these are passed, so they must exist and the others must have defaults.
            "wrap": these are read from a call of vLLM's own; the others do not matter.
            "exists": an attribute, a class or a module.
        parameters: names without self, as "positional, positional, *, keyword, keyword".
    """

    use: Literal["override", "call", "wrap", "exists"]
    parameters: str = ""


Interfaces = Mapping[str, Mapping[str, Touch]]

_EXISTS = Touch("exists")


def _attributes(owner: str, *names: str) -> dict[str, Touch]:
    return {f"{owner}.{name}": _EXISTS for name in names}


_SAMPLING_PARAMS = {
    "SamplingParams": _EXISTS,
    **_attributes("SamplingParams", "extra_args", "structured_outputs"),
}

# Module -> name -> use, for all that both runners need.
_RUNNER: Interfaces = {
    "vllm.config": {"ModelConfig": _EXISTS, "SpeculativeConfig": _EXISTS, "VllmConfig": _EXISTS},
    "vllm.config.model": {
        "ModelConfig.hf_text_config": _EXISTS,
        "ModelConfig.try_get_generation_config": Touch("call"),
    },
    "vllm.distributed": {"get_tensor_model_parallel_rank": Touch("call")},
    "vllm.logger": {"init_logger": Touch("call", "name")},
    "vllm.sampling_params": _SAMPLING_PARAMS,
    "vllm.tokenizers": {"cached_tokenizer_from_config": Touch("call", "model_config")},
}

# What a runner returns, to which its counts are attached.
_RUNNER_OUTPUTS = {
    "AsyncModelRunnerOutput": _EXISTS,
    "EMPTY_MODEL_RUNNER_OUTPUT": _EXISTS,
    "ModelRunnerOutput": _EXISTS,
    "ModelRunnerOutput.req_ids": _EXISTS,
}

INTERFACES: Mapping[str, Interfaces] = {
    # The front end, which reads the options; it has loaded these modules by then.
    "options": {
        "vllm": {"__version__": _EXISTS},
        "vllm.config": {"ModelConfig": _EXISTS, "VllmConfig": _EXISTS},
        "vllm.config.model": {"ModelConfig.get_vocab_size": Touch("call")},
        "vllm.config.speculative": {"SpeculativeConfig.rejection_sample_method": _EXISTS},
        "vllm.config.vllm": {"VllmConfig.additional_config": _EXISTS},
        "vllm.engine.arg_utils": {
            "EngineArgs.create_speculative_config": Touch("wrap", "target_model_config"),
            "EngineArgs.from_cli_args": Touch("wrap", "args"),
            **_attributes(
                "EngineArgs",
                *("additional_config", "reasoning_config", "reasoning_parser"),
                "speculative_config",
            ),
        },
        "vllm.logger": {"init_logger": Touch("call", "name")},
        "vllm.platforms": {"current_platform": _EXISTS},
        "vllm.platforms.interface": {
            "Platform.device_name": _EXISTS,
            "Platform.is_cpu": Touch("call"),
            "Platform.is_cuda_alike": Touch("call"),
            "Platform.is_xpu": Touch("call"),
        },
        # Hooked when they are imported, so a hook on a module that is gone would never run. These
        # are looked for, not imported.
        "vllm.v1.core.sched": {"scheduler": _EXISTS},
        "vllm.v1.engine": {"async_llm": _EXISTS, "input_processor": _EXISTS},
        "vllm.v1.metrics": {"loggers": _EXISTS, "stats": _EXISTS},
        "vllm.v1.executor": {"abstract": _EXISTS},
        "vllm.v1.worker": {"gpu_model_runner": _EXISTS},
        "vllm.v1.worker.gpu": {"model_runner": _EXISTS},
    },
    # The front end again, where markers are named by a parser or by their text.
    "markers": {
        "vllm.config.reasoning": {
            "ReasoningConfig": _EXISTS,
            "ReasoningConfig.initialize_token_ids": Touch("call", "model_config"),
            **_attributes(
                "ReasoningConfig", "reasoning_end_token_ids", "reasoning_start_token_ids"
            ),
        },
        "vllm.tokenizers": {"cached_tokenizer_from_config": Touch("call", "model_config")},
        "vllm.tool_parsers": {"ToolParserManager": _EXISTS},
        "vllm.tool_parsers.abstract_tool_parser": {
            "ToolParserManager.get_tool_parser": Touch("call", "name"),
        },
    },
    # The front end, which checks each request's own options.
    "requests": {
        "vllm.exceptions": {"VLLMValidationError": Touch("call", "message, *, parameter")},
        "vllm.sampling_params": _SAMPLING_PARAMS,
        "vllm.v1.engine.async_llm": {
            "AsyncLLM.generate": Touch("wrap", "prompt, sampling_params"),
            "AsyncLLM.vllm_config": _EXISTS,
        },
        "vllm.v1.engine.input_processor": {
            "InputProcessor.__init__": Touch("wrap"),
            "InputProcessor._validate_params": Touch("wrap", "params"),
            "InputProcessor.vllm_config": _EXISTS,
        },
    },
    # The engine core, where the counts pass through, and drafts that nobody wants end.
    "scheduler": {
        "vllm.v1.core.sched.scheduler": {
            "Scheduler.__init__": Touch("wrap"),
            "Scheduler.add_request": Touch("wrap", "request"),
            "Scheduler.make_stats": Touch("wrap"),
            "Scheduler.schedule": Touch("wrap"),
            "Scheduler.update_from_output": Touch("wrap", "scheduler_output, model_runner_output"),
            **_attributes("Scheduler", "requests", "vllm_config"),
        },
        "vllm.v1.metrics.stats": {"SchedulerStats": _EXISTS},
        "vllm.v1.request": _attributes(
            "Request", "request_id", "sampling_params", "spec_token_ids"
        ),
    },
    # The engine core, which collects what a request wants to know.
    "return": {
        "vllm.v1.core.sched.scheduler": {
            "Scheduler.add_request": Touch("wrap", "request"),
            "Scheduler.requests": _EXISTS,
        },
        "vllm.v1.metrics.stats": {
            "RequestSpecDecodeMetrics": _EXISTS,
            "RequestSpecDecodeMetrics.new": Touch("call", "num_spec_tokens"),
            "RequestSpecDecodeMetrics.to_dict": Touch("call"),
        },
        "vllm.v1.request": _attributes(
            "Request", "num_output_tokens", "request_id", "sampling_params", "spec_decode_metrics"
        ),
    },
    # The front end, which exports and logs them.
    "metrics": {
        "vllm.config.speculative": {"SpeculativeConfig.num_speculative_tokens": _EXISTS},
        "vllm.logger": {"init_logger": Touch("call", "name")},
        "vllm.v1.metrics.loggers": {
            "LoggingStatLogger.__init__": Touch("wrap", "vllm_config"),
            "LoggingStatLogger.log": Touch("wrap"),
            "LoggingStatLogger.record": Touch("wrap", "scheduler_stats, iteration_stats"),
            **_attributes("LoggingStatLogger", "log_prefix", "vllm_config"),
            "PrometheusStatLogger.__init__": Touch("wrap", "vllm_config"),
            "PrometheusStatLogger.record": Touch("wrap", "scheduler_stats"),
            **_attributes(
                "PrometheusStatLogger",
                *("_counter_cls", "_histogram_cls", "per_engine_labelvalues", "vllm_config"),
            ),
            "SchedulerStats": _EXISTS,
        },
    },
    # The engine core, which asks every worker what it verifies with.
    "executor": {
        "vllm.config.parallel": {"ParallelConfig.node_rank_within_dp": _EXISTS},
        "vllm.v1.executor.abstract": {
            "Executor.__init__": Touch("wrap"),
            "Executor.collective_rpc": Touch("call", "method"),
            "Executor.shutdown": Touch("call"),
            **_attributes("Executor", "parallel_config", "vllm_config"),
        },
        "vllm.v1.worker.worker_base": _attributes("WorkerBase", "model_runner", "rank"),
    },
    "V1": {
        **_RUNNER,
        "vllm.config.speculative": {"SpeculativeConfig.num_speculative_tokens": _EXISTS},
        "vllm.platforms": {"current_platform": _EXISTS},
        "vllm.v1.outputs": {
            **_RUNNER_OUTPUTS,
            "LogprobsTensors.logprobs": _EXISTS,
            "SamplerOutput": Touch("call", "*, sampled_token_ids, logprobs_tensors"),
            **_attributes("SamplerOutput", "sampled_token_ids", "logprobs_tensors"),
        },
        "vllm.v1.sample.logits_processor.builtin": {
            "LogitBiasLogitsProcessor": _EXISTS,
            "LogitBiasLogitsProcessor.biases": _EXISTS,
            "MinTokensLogitsProcessor": _EXISTS,
            "MinTokensLogitsProcessor.min_toks": _EXISTS,
            "process_dict_updates": Touch("call", "req_entries, batch_update, new_state"),
        },
        "vllm.v1.sample.logits_processor.interface": {
            "BatchUpdate": _EXISTS,
            "LogitsProcessor": _EXISTS,
            "LogitsProcessor.apply": Touch("override", "logits"),
            "LogitsProcessor.is_argmax_invariant": Touch("override"),
            "LogitsProcessor.update_state": Touch("override", "batch_update"),
            "MoveDirectionality": _EXISTS,
            "MoveDirectionality.SWAP": _EXISTS,
        },
        "vllm.v1.sample.logits_processor.state": _attributes(
            "LogitsProcessors", "argmax_invariant", "non_argmax_invariant"
        ),
        "vllm.v1.sample.metadata": {
            "SamplingMetadata": _EXISTS,
            **_attributes(
                "SamplingMetadata",
                *("all_greedy", "allowed_token_ids_mask", "bad_words_token_ids"),
                *("logitsprocs", "logprob_token_ids", "max_num_logprobs", "no_penalties"),
                "thinking_budget_state_holder",
            ),
        },
        "vllm.v1.sample.rejection_sampler": {
            "RejectionSampler": Touch("call", "sampler, spec_config, device"),
            "RejectionSampler.forward": Touch(
                "override", "metadata, draft_probs, logits, sampling_metadata"
            ),
            "RejectionSampler.apply_logits_processors": Touch(
                "call", "logits, sampling_metadata, metadata"
            ),
            "RejectionSampler._get_logprobs_tensors": Touch(
                "call",
                "max_num_logprobs, metadata, logits, target_logits, bonus_logits, "
                "sampled_token_ids",
            ),
            **_attributes(
                "RejectionSampler", "sampler", "is_processed_logprobs_mode", "use_fp64_gumbel"
            ),
            "apply_sampling_constraints": Touch(
                "call", "logits, cu_num_draft_tokens, sampling_metadata"
            ),
            "rejection_sample": Touch(
                "call",
                "draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, "
                "draft_probs, target_logits, bonus_token_ids, sampling_metadata, *, "
                "use_fp64_gumbel",
            ),
        },
        "vllm.v1.sample.sampler": {
            "Sampler": _EXISTS,
            "Sampler.forward": Touch(
                "call", "*, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override"
            ),
        },
        "vllm.v1.sample.thinking_budget_state": {
            "ThinkingBudgetStateHolder.has_tracked_requests": Touch("call"),
        },
        "vllm.v1.spec_decode.metadata": {
            "SpecDecodeMetadata": _EXISTS,
            **_attributes(
                "SpecDecodeMetadata",
                *("bonus_logits_indices", "cu_num_draft_tokens", "draft_token_ids"),
                *("max_spec_len", "num_draft_tokens", "target_logits_indices"),
            ),
        },
        "vllm.v1.worker.gpu_input_batch": _attributes(
            "InputBatch", "logitsprocs", "logitsprocs_need_output_token_ids", "req_ids"
        ),
        "vllm.v1.worker.gpu_model_runner": {
            "AsyncGPUModelRunnerOutput._model_runner_output": _EXISTS,
            "GPUModelRunner.__init__": Touch("wrap"),
            "GPUModelRunner.execute_model": Touch("wrap"),
            "GPUModelRunner.sample_tokens": Touch("wrap"),
            **_attributes(
                "GPUModelRunner",
                *("device", "input_batch", "max_num_reqs", "model_config", "rejection_sampler"),
                *("speculative_config", "vllm_config"),
            ),
        },
    },
    "V2": {
        **_RUNNER,
        "vllm.config.speculative": {"SpeculativeConfig.num_speculative_tokens": _EXISTS},
        "vllm.v1.outputs": _RUNNER_OUTPUTS,
        "vllm.v1.worker.gpu.async_utils": {"AsyncOutput.model_runner_output": _EXISTS},
        "vllm.v1.worker.gpu.buffer_utils": {
            "StagedWriteTensor": Touch("call", "size, *, dtype, device"),
            "StagedWriteTensor.apply_write": Touch("call"),
            "StagedWriteTensor.gpu": _EXISTS,
            "StagedWriteTensor.stage_write_elem": Touch("call", "index, x"),
            "UvaBackedTensor": Touch("call", "size, *, dtype"),
            "UvaBackedTensor.copy_to_uva": Touch("call"),
            **_attributes("UvaBackedTensor", "gpu", "np"),
        },
        "vllm.v1.worker.gpu.model_runner": {
            "GPUModelRunner.__init__": Touch("wrap"),
            "GPUModelRunner.execute_model": Touch("wrap"),
            "GPUModelRunner.load_model": Touch("wrap"),
            "GPUModelRunner.sample_tokens": Touch("wrap"),
            **_attributes(
                "GPUModelRunner",
                *("device", "model_config", "rejection_sampler", "req_states"),
                *("speculative_config", "vllm_config"),
            ),
        },
        "vllm.v1.worker.gpu.states": {
            "RequestState.add_request": Touch("wrap", "req_id, prompt_len, all_token_ids"),
            **_attributes(
                "RequestState",
                *("all_token_ids", "device", "index_to_req_id", "max_num_reqs", "prompt_len"),
                *("req_id_to_index", "total_len"),
            ),
        },
        "vllm.v1.worker.gpu.sample.logits_processor.interface": {
            "LogitsContext": _EXISTS,
            "LogitsProcessor": _EXISTS,
            "LogitsProcessor.add_request": Touch("override", "req_idx, sampling_params"),
            "LogitsProcessor.apply": Touch("override", "logits, ctx"),
            "LogitsProcessor.apply_staged_writes": Touch("override"),
        },
        "vllm.v1.worker.gpu.sample.sampler": {
            "Sampler": _EXISTS,
            "Sampler.apply_sampling_params": Touch(
                "call",
                "logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, "
                "expanded_local_pos, seq_lens_upper_bound_np",
            ),
            **_attributes(
                "Sampler",
                *("logits_processors", "needs_logits_processing", "sampling_states"),
                "use_fp64_gumbel",
            ),
        },
        "vllm.v1.worker.gpu.sample.states": _attributes("SamplingStates", "seeds", "temperature"),
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler": {
            "RejectionSampler": Touch("call", "sampler, spec_config, device"),
            "RejectionSampler._verify": Touch(
                "override",
                "logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, "
                "idx_mapping_np, expanded_idx_mapping, expanded_local_pos, "
                "seq_lens_upper_bound_np, verify_draft_sampled",
            ),
            **_attributes("RejectionSampler", "num_speculative_steps", "sampler"),
        },
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils": {
            "rejection_sample": Touch(
                "call",
                "target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, "
                "expanded_idx_mapping, expanded_local_pos, temperature, seed, "
                "num_speculative_steps, *, use_fp64",
            ),
        },
    },
    # vLLM's CPU kernels, which cpu_kernels.py mends.
    "cpu": {
        "vllm.triton_utils": {"HAS_TRITON": _EXISTS},
        "vllm.triton_utils.dispatcher": {
            "KernelOverride": _EXISTS,
            "KernelOverride._impl": _EXISTS,
        },
        "vllm.utils.cpu_triton_utils": {
            "_expand_kernel_impl": Touch(
                "wrap", "output, input_val, cu_num_tokens, replace_from, replace_to"
            ),
            "_rejection_random_sample_kernel_impl": Touch(
                "wrap",
                "output_token_ids, cu_num_draft_tokens, draft_token_ids, draft_probs, "
                "target_probs, bonus_token_ids, recovered_token_ids, uniform_probs",
            ),
        },
        "vllm.v1.sample": {"rejection_sampler": _EXISTS},
        "vllm.v1.sample.rejection_sampler": {
            "expand_kernel": _EXISTS,
            "rejection_random_sample_kernel": _EXISTS,
        },
    },
    # `python -m vllm_mars.vllm_cli`, which is vLLM's own command; checked by the tests alone.
    "command": {"vllm.entrypoints.cli.main": {"main": Touch("call")}},
}
