"""Checks of a drafter for probabilistic drafts and the draft temperature."""

from typing import Any

from vllm.logger import init_logger

from vllm_mars.options.config import MarsConfig

logger = init_logger("vllm.vllm_mars.worker.draft_temperature")


def drafter_attribute(drafter: Any, name: str) -> Any:
    """Returns an attribute of a vLLM drafter, or raises RuntimeError if it is missing."""
    try:
        return getattr(drafter, name)
    except AttributeError:
        raise RuntimeError(
            f"{type(drafter).__name__} has no {name}, by which vllm-mars knows how it samples "
            "drafts; install a vLLM that it knows, or drop rejection_sample_method 'mars'."
        ) from None


def scales_temperature(is_probabilistic: bool, drafter: Any, config: MarsConfig) -> bool:
    """Whether drafts have a lower temperature, which is logged; RuntimeError if they cannot."""
    if not is_probabilistic and config.draft_temperature is not None:
        raise RuntimeError(
            f"mars_draft_temperature={config.draft_temperature} is given, but "
            f"{type(drafter).__name__} samples no drafts; drop the option, or draft with a head or "
            "a draft model."
        )
    if not is_probabilistic or config.draft_share == 1:
        return False
    logger.info(
        "Drafts are sampled at %g times each request's temperature (mars_draft_temperature).",
        config.draft_share,
    )
    return True
