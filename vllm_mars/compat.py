"""All knowledge of vLLM releases: which are supported, and every symbol that is used.

`INTERFACES` is the one list of what this project touches in vLLM. `check_interfaces` holds the
installed vLLM against it before anything is replaced, and the tests hold it against tables of
several releases (tests/interfaces). Nothing here runs while tokens are generated, and nothing of
vLLM is imported until a check is asked for.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

# The oldest and the newest. In between `check_interfaces` decides: Model Runner V2 fits from 0.32.
SUPPORTED = ((0, 26), (0, 33))

_RELEASES = " to ".join(f"{major}.{minor}" for major, minor in SUPPORTED)


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


class Symbol(NamedTuple):
    """What a release of vLLM has under a name.

    Attributes:
        kind: what it is.
        parameters: names without self in the notation of a signature; "=" marks a default, "*" the
            begin of the keyword-only ones. Empty where nobody calls it.
    """

    kind: Literal["module", "class", "function", "method", "attribute"]
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
            **_attributes("EngineArgs", "speculative_config", "additional_config"),
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
        "vllm.v1.engine": {"async_llm": _EXISTS, "input_processor": _EXISTS},
        "vllm.v1.worker": {"gpu_model_runner": _EXISTS},
        "vllm.v1.worker.gpu": {"model_runner": _EXISTS},
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
    "V1": {
        **_RUNNER,
        "vllm.config.speculative": {"SpeculativeConfig.num_speculative_tokens": _EXISTS},
        "vllm.platforms": {"current_platform": _EXISTS},
        "vllm.v1.outputs": {
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
        "vllm.v1.worker.gpu_input_batch": {"InputBatch.logitsprocs": _EXISTS},
        "vllm.v1.worker.gpu_model_runner": {
            "GPUModelRunner.__init__": Touch("wrap"),
            **_attributes(
                "GPUModelRunner",
                *("device", "input_batch", "max_num_reqs", "model_config", "rejection_sampler"),
                *("speculative_config", "vllm_config"),
            ),
        },
    },
    "V2": {
        **_RUNNER,
        "vllm.v1.worker.gpu.buffer_utils": {
            "UvaBackedTensor": Touch("call", "size, *, dtype"),
            "UvaBackedTensor.copy_to_uva": Touch("call"),
            **_attributes("UvaBackedTensor", "gpu", "np"),
        },
        "vllm.v1.worker.gpu.model_runner": {
            "GPUModelRunner.__init__": Touch("wrap"),
            "GPUModelRunner.load_model": Touch("wrap"),
            **_attributes(
                "GPUModelRunner",
                *("device", "max_num_reqs", "model_config", "rejection_sampler"),
                *("speculative_config", "vllm_config"),
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


_WAY_OUT = {"V2": "Set VLLM_USE_V2_MODEL_RUNNER=0, install"}


def touches(group: str) -> Iterator[tuple[str, str, Touch]]:
    """Yields (module, name within it, use) of each symbol that a group of `INTERFACES` needs."""
    for module, names in INTERFACES[group].items():
        for name, touch in names.items():
            yield module, name, touch


def check_version(version: str) -> None:
    """Refuses a vLLM that is too old and warns of one that is newer than any tested.

    Args:
        version: vLLM's version string, such as "0.32.0" or "0.33.1.dev3+cpu".

    Raises:
        RuntimeError: the version is below the oldest supported one, or cannot be read.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (release := (int(match[1]), int(match[2]))) < SUPPORTED[0]:
        raise RuntimeError(
            f"vLLM {version} is not supported by vllm-mars, which knows {_RELEASES}; "
            "install one of them or drop rejection_sample_method 'mars'."
        )
    if release > SUPPORTED[-1]:
        from vllm.logger import init_logger

        init_logger("vllm.vllm_mars.compat").warning_once(
            "vLLM %s is newer than the releases that vllm-mars knows (%s); its interfaces are "
            "checked at start, its behaviour is untested.",
            version,
            _RELEASES,
        )


def check_interfaces(group: str) -> None:
    """Refuses an installed vLLM whose interfaces are not the ones that a group is written for.

    Takes less than a millisecond once the group's modules are imported.

    Args:
        group: a key of `INTERFACES`.

    Raises:
        RuntimeError: a symbol is missing or has other parameters; the message names every one.
    """
    differences = [
        f"{module}.{name} {found}"
        for module, name, touch in touches(group)
        if (found := difference(touch, installed_symbol(module, name, touch)))
    ]
    if differences:
        import vllm

        raise RuntimeError(
            f"vLLM {vllm.__version__} has other interfaces than vllm-mars needs ({group}): "
            f"{'; '.join(differences)}. {_WAY_OUT.get(group, 'Install')} a vLLM that it knows "
            f"({_RELEASES}), look for a newer vllm-mars, or drop rejection_sample_method 'mars'."
        )


def difference(touch: Touch, symbol: Symbol | None) -> str | None:
    """Says in words what is wrong with a symbol for a use of it, or None if nothing is.

    Args:
        touch: the use.
        symbol: what the release has, or None where it has nothing under that name.
    """
    if symbol is None:
        return "is missing"
    if touch.use == "exists":
        return None
    if symbol.kind in ("attribute", "module"):
        return f"is an attribute, but a function of ({touch.parameters}) is expected"
    present = _split(symbol.parameters)
    names = [name.rstrip("=") for name in present]
    positional, _, keyword = touch.parameters.partition("*")
    first, named = _split(positional), set(_split(keyword))
    if touch.use == "override":
        fits = names == first
    else:
        fits = names[: len(first)] == first
    if touch.use == "call":
        required = {name for name in present[len(first) :] if name[0] != "*" and name[-1] != "="}
        fits = fits and required <= named <= set(names[len(first) :])
    if fits:
        return None
    verb = {"override": "overridden", "call": "passed", "wrap": "read"}[touch.use]
    return f"has parameters ({symbol.parameters}), but ({touch.parameters}) are {verb}"


def _split(names: str) -> list[str]:
    return [name for name in (part.strip() for part in names.split(",")) if name]


def installed_symbol(module: str, name: str, touch: Touch) -> Symbol | None:
    """What the installed vLLM has under a name, or None where it has nothing.

    Args:
        module: the module; imported if it is not yet.
        name: name within the module, with dots for members of a class.
        touch: the use; parameters are read only where it has some.
    """
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    owner = None
    for part in name.split("."):
        owner = found
        found = getattr(owner, part, _EXISTS)
        if found is _EXISTS:
            return _undefined(owner, part)
    if inspect.isclass(found):
        kind: Literal["class", "method", "function"] = "class"
    elif callable(found) and touch.use != "exists":
        kind = "method" if inspect.isclass(owner) else "function"
    else:
        return Symbol("module" if inspect.ismodule(found) else "attribute")
    return Symbol(kind, "" if touch.use == "exists" else _parameters(found))


def _undefined(owner: Any, name: str) -> Symbol | None:
    """What is under a name that only an instance has, or a package that has not imported it yet."""
    if inspect.ismodule(owner):
        is_package = hasattr(owner, "__path__")
        found = is_package and importlib.util.find_spec(f"{owner.__name__}.{name}")
        return Symbol("module") if found else None
    for base in getattr(owner, "__mro__", ()):
        members = vars(base)
        if name in members.get("__annotations__", ()):
            return Symbol("attribute")
        for method in ("__init__", "__post_init__"):
            # The names that the method's code mentions, so those of all attributes that it assigns.
            code = getattr(inspect.unwrap(members.get(method, object)), "__code__", None)
            if code is not None and name in code.co_names:
                return Symbol("attribute")
    return None


def _parameters(function: Any) -> str:
    """The parameters of a callable in the notation of `Symbol`."""
    notation: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(p[0] == "*" for p in notation):
            notation.append("*")
        if parameter.kind is parameter.VAR_POSITIONAL:
            name = f"*{name}"
        elif parameter.kind is parameter.VAR_KEYWORD:
            name = f"**{name}"
        notation.append(name if parameter.default is parameter.empty else f"{name}=")
    return ", ".join(name for name in notation if name != "self")
