"""Every symbol of vLLM that this project uses, and how: the one list, without any code.

`vllm_mars.engine.compat` holds the installed vLLM against it. Nothing of vLLM is imported here.
"""

from collections.abc import Mapping, Sequence
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


# The uses of each module's symbols: "use name(parameters)", or for what exists the name alone, or
# "Class: attribute, attribute".
Interfaces = Mapping[str, Sequence[str]]

# All that both runners need.
_RUNNER: Interfaces = {
    "vllm.config": ["ModelConfig", "SpeculativeConfig", "VllmConfig"],
    "vllm.config.model": [
        "ModelConfig.hf_text_config",
        "call ModelConfig.try_get_generation_config",
    ],
    "vllm.config.parallel": ["ParallelConfig.distributed_executor_backend"],
    "vllm.distributed": ["call get_tensor_model_parallel_rank"],
    "vllm.logger": ["call init_logger(name)"],
    "vllm.sampling_params": ["SamplingParams", "SamplingParams: extra_args, structured_outputs"],
    "vllm.tokenizers": ["call cached_tokenizer_from_config(model_config)"],
    "vllm.config.speculative": ["SpeculativeConfig.num_speculative_tokens"],
    # What a runner returns, to which its counts are attached.
    "vllm.v1.outputs": [
        "AsyncModelRunnerOutput",
        "EMPTY_MODEL_RUNNER_OUTPUT",
        "ModelRunnerOutput",
        "ModelRunnerOutput.req_ids",
    ],
}

INTERFACES: Mapping[str, Interfaces] = {
    # The front end, which reads the options; it has loaded these modules by then.
    "options": {
        "vllm": ["__version__"],
        "vllm.config": ["ModelConfig", "VllmConfig"],
        "vllm.config.model": ["call ModelConfig.get_vocab_size"],
        "vllm.config.speculative": ["SpeculativeConfig.rejection_sample_method"],
        "vllm.config.vllm": ["VllmConfig.additional_config"],
        "vllm.engine.arg_utils": [
            "wrap EngineArgs.create_speculative_config(target_model_config)",
            "wrap EngineArgs.from_cli_args(args)",
            "EngineArgs: additional_config, reasoning_config, reasoning_parser, speculative_config",
        ],
        "vllm.logger": ["call init_logger(name)"],
        "vllm.platforms": ["current_platform"],
        "vllm.platforms.interface": [
            "Platform.device_name",
            "call Platform.is_cpu",
            "call Platform.is_cuda_alike",
            "call Platform.is_xpu",
        ],
        # Hooked when they are imported, so a hook on a module that is gone would never run. These
        # are looked for, not imported.
        "vllm.v1.core.sched": ["scheduler"],
        "vllm.entrypoints.openai.chat_completion": ["serving"],
        "vllm.entrypoints.openai.completion": ["serving"],
        "vllm.entrypoints.scale_out.token_in_token_out": ["serving"],
        "vllm.v1.engine": ["async_llm", "input_processor", "output_processor"],
        "vllm.v1.metrics": ["loggers", "stats"],
        "vllm.v1.executor": ["abstract"],
        "vllm.v1.worker": ["gpu_model_runner"],
        "vllm.v1.worker.gpu": ["model_runner"],
    },
    # The front end again, where markers are named by a parser or by their text.
    "markers": {
        "vllm.config.reasoning": [
            "ReasoningConfig",
            "call ReasoningConfig.initialize_token_ids(model_config)",
            "ReasoningConfig: natural_reasoning_end_token_ids, reasoning_start_token_ids",
        ],
        "vllm.tokenizers": ["call cached_tokenizer_from_config(model_config)"],
        "vllm.tool_parsers": ["ToolParserManager"],
        "vllm.tool_parsers.abstract_tool_parser": ["call ToolParserManager.get_tool_parser(name)"],
    },
    # The front end, which checks each request's own options.
    "requests": {
        "vllm.exceptions": ["call VLLMValidationError(message, *, parameter)"],
        "vllm.sampling_params": _RUNNER["vllm.sampling_params"],
        "vllm.v1.engine": ["EngineCoreRequest.sampling_params"],
        "vllm.v1.engine.async_llm": [
            "wrap AsyncLLM.generate(prompt, sampling_params)",
            "AsyncLLM.vllm_config",
        ],
        "vllm.v1.engine.input_processor": [
            "wrap InputProcessor.__init__",
            "wrap InputProcessor._validate_params(params)",
            "wrap InputProcessor.process_inputs",
            "InputProcessor.vllm_config",
        ],
    },
    # The engine core, where the counts pass through.
    "scheduler": {
        "vllm.v1.core.sched.scheduler": [
            "wrap Scheduler.__init__",
            "wrap Scheduler.make_stats",
            "wrap Scheduler.update_from_output(scheduler_output, model_runner_output)",
            "Scheduler.vllm_config",
        ],
        "vllm.v1.metrics.stats": ["SchedulerStats"],
    },
    # The engine core, which collects what a request wants to know.
    "return": {
        "vllm.v1.core.sched.scheduler": [
            "wrap Scheduler.add_request(request)",
            "Scheduler.requests",
        ],
        "vllm.v1.metrics.stats": [
            "RequestSpecDecodeMetrics",
            "call RequestSpecDecodeMetrics.new(num_spec_tokens)",
            "RequestSpecDecodeMetrics: per_step_accepted, per_step_drafted",
        ],
        "vllm.v1.request": ["Request: request_id, sampling_params, spec_decode_metrics"],
        "vllm.v1.engine": [
            "EngineCoreOutput: new_token_ids, request_id, spec_decode_metrics",
            "EngineCoreOutputs.outputs",
        ],
        "vllm.v1.engine.detokenizer": ["call IncrementalDetokenizer.num_output_tokens"],
        "vllm.v1.engine.output_processor": [
            "RequestState",
            "RequestState: detokenizer, spec_decode_metrics",
        ],
    },
    # The server, which adds it to its responses.
    "answers": {
        "vllm.entrypoints.generate.base.protocol": ["call PerRequestMetrics"],
        "vllm.entrypoints.openai.chat_completion.serving": [
            "wrap OpenAIServingChat.chat_completion_full_generator(request, result_generator)",
            "wrap OpenAIServingChat.chat_completion_stream_generator(request, result_generator)",
            "OpenAIServingChat.engine_client",
        ],
        "vllm.entrypoints.openai.completion.serving": [
            "wrap OpenAIServingCompletion.completion_stream_generator(request, engine_inputs, "
            "result_generator)",
            "wrap OpenAIServingCompletion.request_output_to_completion_response(final_res_batch, "
            "request)",
            "OpenAIServingCompletion.engine_client",
        ],
        "vllm.entrypoints.scale_out.token_in_token_out.serving": [
            "wrap ServingTokens.serve_tokens_full_generator(request, result_generator)",
            "wrap ServingTokens.serve_tokens_stream_generator(request, result_generator)",
            "ServingTokens.engine_client",
        ],
    },
    # The front end, which exports and logs them.
    "metrics": {
        "vllm.config.speculative": ["SpeculativeConfig.num_speculative_tokens"],
        "vllm.logger": ["call init_logger(name)"],
        "vllm.v1.metrics.loggers": [
            "wrap LoggingStatLogger.__init__(vllm_config)",
            "wrap LoggingStatLogger.log",
            "wrap LoggingStatLogger.record(scheduler_stats, iteration_stats)",
            "LoggingStatLogger: log_prefix, vllm_config",
            "wrap PrometheusStatLogger.__init__(vllm_config)",
            "wrap PrometheusStatLogger.record(scheduler_stats)",
            "PrometheusStatLogger: _counter_cls, _histogram_cls, per_engine_labelvalues, "
            "vllm_config",
            "SchedulerStats",
        ],
    },
    # The engine core, which asks every worker what it verifies with.
    "executor": {
        "vllm.config.parallel": ["ParallelConfig.node_rank_within_dp"],
        "vllm.v1.executor.abstract": [
            "wrap Executor.__init__",
            "call Executor.collective_rpc(method)",
            "call Executor.shutdown",
            "Executor: parallel_config, vllm_config",
        ],
        "vllm.v1.worker.worker_base": ["WorkerBase: model_runner, rank"],
    },
    "V1": {
        **_RUNNER,
        "vllm.platforms": ["current_platform"],
        "vllm.v1.outputs": [
            *_RUNNER["vllm.v1.outputs"],
            "LogprobsTensors",
            "LogprobsTensors: logprob_token_ids, logprobs",
            "call SamplerOutput(*, sampled_token_ids, logprobs_tensors)",
            "SamplerOutput: sampled_token_ids, logprobs_tensors",
        ],
        "vllm.v1.sample.logits_processor.builtin": [
            "LogitBiasLogitsProcessor",
            "LogitBiasLogitsProcessor.biases",
            "MinTokensLogitsProcessor",
            "MinTokensLogitsProcessor.min_toks",
            "call process_dict_updates(req_entries, batch_update, new_state)",
        ],
        "vllm.v1.sample.logits_processor.interface": [
            "BatchUpdate",
            "LogitsProcessor",
            "override LogitsProcessor.apply(logits)",
            "override LogitsProcessor.is_argmax_invariant",
            "override LogitsProcessor.update_state(batch_update)",
            "MoveDirectionality",
            "MoveDirectionality.SWAP",
        ],
        "vllm.v1.sample.logits_processor.state": [
            "LogitsProcessors: argmax_invariant, non_argmax_invariant"
        ],
        "vllm.v1.sample.metadata": [
            "SamplingMetadata",
            "SamplingMetadata: all_greedy, allowed_token_ids_mask, bad_words_token_ids, "
            "logitsprocs, logprob_token_ids, max_num_logprobs, no_penalties, temperature, "
            "thinking_budget_state_holder",
        ],
        "vllm.v1.sample.rejection_sampler": [
            "call RejectionSampler(sampler, spec_config, device)",
            "override RejectionSampler.forward(metadata, draft_probs, logits, sampling_metadata)",
            "call RejectionSampler.apply_logits_processors(logits, sampling_metadata, metadata)",
            "RejectionSampler: sampler, is_logits_logprobs_mode, is_processed_logprobs_mode, "
            "use_fp64_gumbel",
            "call apply_sampling_constraints(logits, cu_num_draft_tokens, sampling_metadata)",
            "call rejection_sample(draft_token_ids, num_draft_tokens, max_spec_len, "
            "cu_num_draft_tokens, draft_probs, target_logits, bonus_token_ids, "
            "sampling_metadata, *, use_fp64_gumbel)",
        ],
        "vllm.v1.sample.sampler": [
            "Sampler",
            "call Sampler.compute_logprobs(logits)",
            "call Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)",
            "call Sampler.forward(*, logits, sampling_metadata, predict_bonus_token, "
            "logprobs_mode_override)",
        ],
        "vllm.v1.sample.thinking_budget_state": [
            "call ThinkingBudgetStateHolder.has_tracked_requests"
        ],
        "vllm.v1.spec_decode.llm_base_proposer": [
            "wrap SpecDecodeBaseProposer._sample_from_logits(logits, sampling_metadata)",
            "SpecDecodeBaseProposer._enable_probabilistic_draft_probs",
        ],
        "vllm.v1.spec_decode.metadata": [
            "SpecDecodeMetadata",
            "SpecDecodeMetadata: bonus_logits_indices, cu_num_draft_tokens, "
            "cu_num_sampled_tokens, draft_token_ids, max_spec_len, num_draft_tokens, "
            "target_logits_indices",
        ],
        "vllm.v1.worker.gpu_input_batch": [
            "InputBatch: generators, logitsprocs, logitsprocs_need_output_token_ids, num_reqs, "
            "req_ids"
        ],
        "vllm.v1.worker.gpu_model_runner": [
            "AsyncGPUModelRunnerOutput._model_runner_output",
            "wrap GPUModelRunner.__init__",
            "wrap GPUModelRunner.execute_model",
            "wrap GPUModelRunner.sample_tokens",
            "GPUModelRunner: device, discard_request_mask, drafter, input_batch, max_num_reqs, "
            "model_config, rejection_sampler, speculative_config, vllm_config",
        ],
    },
    "V2": {
        **_RUNNER,
        "vllm.v1.outputs": [
            *_RUNNER["vllm.v1.outputs"],
            "LogprobsTensors",
            "LogprobsTensors: logprob_token_ids, logprobs",
        ],
        "vllm.v1.worker.gpu.async_utils": [
            "AsyncOutput.model_runner_output",
            "call stream(to_stream, from_stream)",
        ],
        "vllm.v1.worker.gpu.buffer_utils": [
            "call StagedWriteTensor(size, *, dtype, device)",
            "call StagedWriteTensor.apply_write",
            "StagedWriteTensor.gpu",
            "call StagedWriteTensor.stage_write_elem(index, x)",
            "call UvaBackedTensor(size, *, dtype)",
            "call UvaBackedTensor.copy_to_uva",
            "UvaBackedTensor: gpu, np",
        ],
        "vllm.v1.worker.gpu.model_runner": [
            "wrap GPUModelRunner.__init__",
            "wrap GPUModelRunner.execute_model",
            "wrap GPUModelRunner.load_model",
            "wrap GPUModelRunner.sample_tokens",
            "GPUModelRunner: device, main_stream, model_config, output_copy_stream, "
            "rejection_sampler, req_states, sampler, speculative_config, speculator, vllm_config",
        ],
        "vllm.v1.worker.gpu.input_batch": ["InputBatch", "InputBatch.idx_mapping_np"],
        "vllm.v1.worker.gpu.states": [
            "wrap RequestState.add_request(req_id, prompt_len, all_token_ids)",
            "RequestState: all_token_ids, device, index_to_req_id, max_num_reqs, prompt_len, "
            "req_id_to_index, total_len",
        ],
        "vllm.v1.worker.gpu.sample.logits_processor.interface": [
            "LogitsContext",
            "LogitsProcessor",
            "override LogitsProcessor.add_request(req_idx, sampling_params)",
            "override LogitsProcessor.apply(logits, ctx)",
            "override LogitsProcessor.apply_staged_writes",
        ],
        "vllm.v1.worker.gpu.sample.logprob": [
            "call LogprobTokenIdsState.max_num_token_ids(idx_mapping_np)",
            "call compute_topk_scores(logits, num_logprobs, sampled_token_ids, cu_num_logits, *, "
            "logprob_token_ids_state, expanded_idx_mapping, max_per_req_token_ids, logits_mode)",
        ],
        "vllm.v1.worker.gpu.sample.output": ["SamplerOutput"],
        "vllm.v1.worker.gpu.sample.sampler": [
            "Sampler",
            "call Sampler.apply_sampling_params(logits, expanded_idx_mapping, idx_mapping, "
            "idx_mapping_np, pos, input_ids, expanded_local_pos, seq_lens_upper_bound_np)",
            "Sampler: logits_processors, logprob_token_ids_state, logprobs_mode, "
            "needs_logits_processing, sampling_states, use_fp64_gumbel",
        ],
        "vllm.v1.worker.gpu.sample.states": ["SamplingStates: seeds, temperature"],
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler": [
            "call RejectionSampler(sampler, spec_config, device)",
            "override RejectionSampler.__call__(logits, input_batch, draft_logits, invalid_drafts)",
            "override RejectionSampler._verify(logits, draft_logits, draft_sampled, pos, "
            "cu_num_logits, idx_mapping, idx_mapping_np, expanded_idx_mapping, "
            "expanded_local_pos, seq_lens_upper_bound_np, verify_draft_sampled)",
            "override RejectionSampler._get_logprobs_tensors(sampled, num_sampled, logits, "
            "cu_num_logits, cu_num_logits_np, max_num_logprobs)",
            "RejectionSampler: num_speculative_steps, sampler",
        ],
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils": [
            "call rejection_sample(target_logits, draft_logits, draft_sampled, cu_num_logits, "
            "pos, idx_mapping, expanded_idx_mapping, expanded_local_pos, temperature, seed, "
            "num_speculative_steps, *, use_fp64)"
        ],
        "vllm.v1.worker.gpu.spec_decode.speculator": [
            "wrap BaseSpeculator.propose(input_batch, attn_metadata, slot_mappings, "
            "last_hidden_states, aux_hidden_states, num_sampled, num_rejected, last_sampled, "
            "next_prefill_tokens, temperature)",
            "DraftModelSpeculator.draft_logits",
        ],
    },
    # vLLM's CPU kernels, which cpu_kernels.py mends.
    "cpu": {
        "vllm.triton_utils": ["HAS_TRITON"],
        "vllm.triton_utils.dispatcher": ["KernelOverride", "KernelOverride._impl"],
        "vllm.utils.cpu_triton_utils": [
            "wrap _expand_kernel_impl(output, input_val, cu_num_tokens, replace_from, replace_to)",
            "wrap _rejection_random_sample_kernel_impl(output_token_ids, cu_num_draft_tokens, "
            "draft_token_ids, draft_probs, target_probs, bonus_token_ids, recovered_token_ids, "
            "uniform_probs)",
        ],
        "vllm.v1.sample": ["rejection_sampler"],
        "vllm.v1.sample.rejection_sampler": ["expand_kernel", "rejection_random_sample_kernel"],
    },
    # `python -m vllm_mars.vllm_cli`, which is vLLM's own command; checked by the tests alone.
    "command": {"vllm.entrypoints.cli.main": ["call main"]},
}
