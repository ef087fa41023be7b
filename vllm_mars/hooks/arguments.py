"""Options in vLLM's front end: extracted from the engine arguments, validated per request."""

import logging
import os
from typing import TYPE_CHECKING, Any

from vllm_mars.hooks.compat import check_interfaces
from vllm_mars.hooks.pickled import PickledConfig
from vllm_mars.options.config import (
    CONFIG_KEY,
    MarsConfig,
    config_of,
    lossy_reason,
    shown,
    split_speculative_config,
)
from vllm_mars.options.lock import check_lock
from vllm_mars.options.markers import resolve_markers
from vllm_mars.options.requests import check_options
from vllm_mars.releases import can_draw, check_version, drafts_first_choices

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
    from vllm.sampling_params import SamplingParams

logger = logging.getLogger(f"vllm.{__name__}")

_PROBABILISTIC = "probabilistic"


def extract_config(engine_args: Any, model_config: "ModelConfig") -> None:
    """Moves the `mars_*` options from the speculative config to `additional_config`.

    Both dicts of vLLM's `EngineArgs` are replaced, and only if all checks pass.
    """
    config, speculative_config = split_speculative_config(engine_args.speculative_config)
    method = speculative_config.get("rejection_sample_method", "standard")
    check_lock(lossy_reason(config, method))
    if config is None:
        return
    import vllm

    check_version(vllm.__version__)
    check_interfaces("front end")
    _check_served(engine_args)
    mode = getattr(engine_args, "logprobs_mode", None)
    if config.logprobs == "sampled" and mode != "processed_logprobs":
        raise ValueError(
            f"mars_logprobs='sampled' needs logprobs of the processed logits, but logprobs_mode is "
            f"{mode!r}; add --logprobs-mode processed_logprobs."
        )
    vocab = model_config.get_vocab_size()
    outside = [token for token in config.protected_token_ids or () if token >= vocab]
    if outside:
        raise ValueError(
            f"mars_protected_token_ids={shown(outside)} is outside the model's vocabulary [0, "
            f"{vocab}); leave these ids out."
        )
    config = resolve_markers(config, engine_args, model_config)
    engine_args.speculative_config = speculative_config
    engine_args.additional_config = {
        **engine_args.additional_config,
        CONFIG_KEY: PickledConfig(config),
    }


def resolve_draft_sampling(engine_args: Any, speculative_config: "SpeculativeConfig") -> None:
    """Makes drafts probabilistic if the drafter can, unless the user decides; logs the choice."""
    config = config_of(engine_args)
    if config is None:
        return
    # The method is known only after vLLM has built its config: it can depend on the draft model, or
    # come from `--spec-method`.
    _check_drafts(config, speculative_config)
    user_config = engine_args.speculative_config
    supports_probabilistic = can_draw(speculative_config) and not config.rule.outright
    # At the same loss, sampled requests accept more of probabilistic drafts.
    if supports_probabilistic and "draft_sample_method" not in user_config:
        speculative_config.draft_sample_method = _PROBABILISTIC
        # vLLM may build a second config from the engine arguments.
        user_config["draft_sample_method"] = _PROBABILISTIC
    is_probabilistic = speculative_config.draft_sample_method == _PROBABILISTIC
    if not is_probabilistic and config.draft_temperature is not None:
        raise ValueError(
            f"mars_draft_temperature={config.draft_temperature} is given, but drafts are fixed; "
            "draft with a head or a draft model and mars_max_loss or mars_price, without "
            '"draft_sample_method": "greedy", or drop the option.'
        )
    # vLLM would verify them against uninitialized logits.
    if is_probabilistic and drafts_first_choices(speculative_config):
        raise ValueError(
            "draft_sample_method='probabilistic' is given, but XPress drafts argmax tokens; drop "
            "the option."
        )
    kind = "fixed"
    if is_probabilistic:
        kind = 'probabilistic where requests sample ("draft_sample_method": "greedy" fixes them)'
    elif supports_probabilistic:
        kind = (
            'fixed ("draft_sample_method": "probabilistic", the default, gains more where requests '
            "sample, at the same loss)"
        )
    logger.info("Drafts are %s.", kind)


def check_request(params: "SamplingParams", vllm_config: "VllmConfig") -> None:
    """Validates the options of a request; a VLLMValidationError becomes an HTTP 400."""
    config = config_of(vllm_config) if getattr(params, "extra_args", None) else None
    if config is None:
        return
    from vllm.exceptions import VLLMValidationError

    try:
        check_options(params, config)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


def _check_drafts(config: MarsConfig, speculative_config: "SpeculativeConfig") -> None:
    method = speculative_config.method
    if speculative_config.uses_extract_hidden_states():
        _refuse(
            f"method={method!r}",
            "it drafts nothing that could be verified",
            "drop rejection_sample_method",
        )
    if speculative_config.draft_sample_method != _PROBABILISTIC:
        return
    if not (speculative_config.use_eagle() or speculative_config.uses_draft_model()):
        raise ValueError(
            f"draft_sample_method={_PROBABILISTIC!r} is given, but method {method!r} drafts "
            "without a distribution to sample from; drop the key, or draft with a head or a draft "
            "model."
        )
    if config.rule.outright:
        raise ValueError(
            f"{config.rule.option}={config.value:g} and draft_sample_method='probabilistic' do "
            "not go together: what this rule loses on such drafts is not counted; give "
            "mars_price or mars_max_loss instead, or drop draft_sample_method."
        )


def _refuse(what: str, reason: str, way_out: str) -> None:
    raise NotImplementedError(
        f"rejection_sample_method='mars' cannot serve {what}: {reason}; {way_out}."
    )


def _check_served(engine_args: Any) -> None:
    from vllm.platforms import current_platform

    # Also checked with `--headless`, since such a node does not know its front end.
    if (rust_frontend := os.environ.get("VLLM_USE_RUST_FRONTEND", "0")) != "0":
        _refuse(
            f"VLLM_USE_RUST_FRONTEND={rust_frontend}",
            "that front end checks no options of requests and applies no overrides",
            "unset the variable",
        )
    if getattr(engine_args, "enable_batch_sharded_sampling", False):
        _refuse(
            "enable_batch_sharded_sampling",
            "each rank verifies requests of its own, but only the first one counts relaxed tokens",
            "switch it off",
        )
    if getattr(engine_args, "watermark_config", None) is not None:
        _refuse(
            "a watermark_config",
            "relaxed tokens carry no watermark",
            "drop the watermark or set another rejection_sample_method",
        )
    if not isinstance(engine_args.additional_config, dict):
        _refuse(
            "an additional_config that is not a dict",
            "the options travel in it",
            "pass a dict",
        )
    if not (
        current_platform.is_cpu() or current_platform.is_cuda_alike() or current_platform.is_xpu()
    ):
        _refuse(
            f"the platform {current_platform.device_name}",
            "its model runner is not vLLM's own",
            "serve on CPU, CUDA, ROCm or XPU",
        )
