"""Whether a drafter draws its drafts, and at a share of each request's temperature."""

from typing import Any

from vllm.logger import init_logger

from vllm_mars.options.config import MarsConfig

logger = init_logger("vllm.vllm_mars.worker.draft_temperature")


def said_by(drafter: Any, name: str) -> Any:
    """An attribute by which vLLM's drafters say whether and how they draw."""
    try:
        return getattr(drafter, name)
    except AttributeError:
        raise RuntimeError(
            f"{type(drafter).__name__} has no {name}, by which vllm-mars knows how it draws "
            "drafts; install a vLLM that it knows, or drop rejection_sample_method 'mars'."
        ) from None


def is_scaled(draws: bool, drafter: Any, config: MarsConfig) -> bool:
    """Whether there is something to scale, which the log then says."""
    if not draws and config.draft_temperature is not None:
        raise RuntimeError(
            f"mars_draft_temperature={config.draft_temperature} is given, but "
            f"{type(drafter).__name__} draws no drafts; drop the option, or draft with a head or a "
            "draft model."
        )
    if not draws or config.draft_share == 1:
        return False
    logger.info(
        "Drafts are drawn at %g times each request's temperature (mars_draft_temperature).",
        config.draft_share,
    )
    return True
