"""A vLLM without the interfaces that are hooked is refused before anything is replaced."""

import logging
import pkgutil
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from engines import MARS, engine_config
from vllm_mars import MarsConfig, releases
from vllm_mars.hooks import compat
from vllm_mars.hooks import patches as hooks
from vllm_mars.hooks.pickled import PickledConfig
from vllm_mars.options.config import config_of


def test_every_difference_is_named(monkeypatch):
    import vllm
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    runner = "vllm.v1.worker.gpu.model_runner"
    monkeypatch.delattr(f"{runner}.GPUModelRunner.load_model")
    monkeypatch.setattr(RejectionSampler, "__call__", lambda self, logits, step: logits)
    monkeypatch.delattr(RejectionSampler, "_verify")
    monkeypatch.setattr(RejectionSampler, "_get_logprobs_tensors", lambda self, logits: None)
    monkeypatch.setattr(BaseSpeculator, "propose", lambda self, input_batch: None)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.states", None)
    with pytest.raises(RuntimeError) as refused:
        compat.check_interfaces("V2")
    text = str(refused.value)
    assert text.startswith(f"vLLM {vllm.__version__} has other interfaces than vllm-mars needs (V2")
    for difference in (
        f"{runner}:GPUModelRunner.load_model is missing",
        "vllm.v1.worker.gpu.states:RequestState.add_request is missing (import of",
        "RejectionSampler.__call__ takes (logits, step), but (logits, input_batch, draft_logits, ",
        "RejectionSampler._get_logprobs_tensors takes (logits), but (sampled, num_sampled, ",
        "has no attribute '_verify'",
        "BaseSpeculator.propose takes (input_batch), but (input_batch, ..., temperature, seeds, ",
    ):
        assert difference in text
    assert text.endswith(
        "Install a vLLM that it knows (0.32 and 0.33), look for a newer vllm-mars, leave out a "
        "plugin that replaced a function, or drop rejection_sample_method 'mars'."
    )


PARTS = [(part, name) for part, needed in compat.NEEDED.items() for name in needed]


@pytest.mark.parametrize("names", [0, 1])
@pytest.mark.parametrize(("part", "name"), PARTS)
def test_another_plugins_wrapper_is_accepted(monkeypatch, part, name, names):
    """The wrapper forwards all arguments and names none or the first of vLLM's parameters."""
    path, method = re.fullmatch(r"(.*)[.:](\w+)", name).groups()
    owner = pkgutil.resolve_name(path)
    positional = compat.NEEDED[part][name].partition("...")[0].split(", ")
    first = "".join(f"{parameter}, " for parameter in positional[:names] if parameter)
    wrapper = eval(
        f"lambda self, {first}*a, _old=old, **k: _old(self, {first}*a, **k)",
        {"old": getattr(owner, method)},
    )
    monkeypatch.setattr(owner, method, wrapper)
    compat.check_interfaces(part)


def test_another_plugins_wrong_wrapper_is_named(monkeypatch):
    from vllm.v1.engine.input_processor import InputProcessor

    monkeypatch.setattr(InputProcessor, "_validate_params", lambda self, own, *a, **k: None)
    with pytest.raises(
        RuntimeError,
        match=r"_validate_params takes \(own, a, k\), but \(params\) come first here "
        rf"\({__name__} replaced it\). Install",
    ):
        compat.check_interfaces("front end")


def test_a_missing_module_is_named(monkeypatch):
    monkeypatch.setitem(compat.HOOKS, "vllm.v1.worker.gone.runner", "")
    with pytest.raises(RuntimeError, match=r"\(front end\): vllm.v1.worker.gone.runner is missing"):
        compat.check_interfaces("front end")


@pytest.mark.parametrize("version", ["0.31.9", "0.8.5.post1", "dev"])
def test_unsupported_versions_are_refused(version):
    with pytest.raises(RuntimeError, match=f"vLLM {version} is not supported .* 0.32 and 0.33"):
        releases.check_version(version)


def test_a_vllm_that_ray_cannot_serve_is_refused():
    """vLLM 0.33 lacks a module that Ray imports."""
    pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    program = (
        "import sys; sys.modules['vllm.entrypoints.launchers.cli_args'] = None;"
        "import vllm_mars.ray_serve"
    )
    refused = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert re.search(r"Error: Ray .* cannot serve vLLM .*Ray 2.60 goes with vLLM", refused.stderr)
    assert "install vLLM 0.32 on every node, or run `vllm serve` for each" in refused.stderr


def test_a_newer_version_is_warned_of(tiny_model, monkeypatch, caplog):
    import vllm

    # vLLM 0.33 sets up its logger again for the first config.
    engine_config(tiny_model, MARS)
    caplog.clear()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    releases.check_version("0.33.1.dev3+cpu")
    assert not caplog.text
    monkeypatch.setattr(vllm, "__version__", version := "0.34.0")
    assert config_of(engine_config(tiny_model, MARS)).max_loss == 0.02
    assert (
        f"vLLM {version} is newer than the releases that vllm-mars knows (0.32 and 0.33); its "
        "interfaces are checked at start, its behaviour is untested."
    ) in caplog.text


def test_a_front_end_with_other_interfaces_is_refused(tiny_model, monkeypatch):
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    monkeypatch.setattr(PrometheusStatLogger, "record", lambda self, step: None)
    message = r"\(front end\): .*PrometheusStatLogger.record takes \(step\), but \(scheduler_stats"
    with pytest.raises(RuntimeError, match=message):
        engine_config(tiny_model, MARS)


def test_a_server_with_other_interfaces_is_refused_at_start(monkeypatch):
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    method = "completion_stream_generator"
    monkeypatch.setattr(OpenAIServingCompletion, method, lambda self, request, results: None)
    module = type(sys)("vllm.entrypoints.openai.chat_completion.serving")

    class OpenAIServingChat:
        def __init__(self, engine_client):
            self.engine_client = engine_client

        def chat_completion_full_generator(self):
            pass

        chat_completion_stream_generator = chat_completion_full_generator

    module.OpenAIServingChat = OpenAIServingChat
    hooks.patch_chat(module)
    module.OpenAIServingChat(SimpleNamespace(vllm_config=WithoutMars))
    message = rf"\(API server\): .*{method} takes \(request, results\), but \(request, engine_in"
    with pytest.raises(RuntimeError, match=message):
        module.OpenAIServingChat(SimpleNamespace(vllm_config=Config))


class Config:
    additional_config = {"mars": PickledConfig(MarsConfig(theta=0.9))}


class WithoutMars:
    additional_config = {}


class StandIn:
    """A class of vLLM whose `__init__` is hooked."""

    def __init__(self, config=Config):
        self.vllm_config = config
        self.loaded = False

    def load_model(self):
        self.loaded = True


@pytest.mark.parametrize(
    ("part", "hook", "owner", "method"),
    [
        ("engine core", "patch_scheduler", "core.sched.scheduler:Scheduler", "update_from_output"),
        ("V1", "patch_runner_v1", "sample.rejection_sampler:RejectionSampler", "forward"),
        ("V2", "patch_runner_v2", "worker.gpu.model_runner:GPUModelRunner", "finish_requests"),
    ],
)
def test_each_hook_checks_before_it_changes_anything(monkeypatch, part, hook, owner, method):
    module = type(sys)("stand_in_module")
    module.Scheduler, module.GPUModelRunner = (type(n, (StandIn,), {}) for n in ("S", "R"))
    getattr(hooks, hook)(module)
    monkeypatch.setattr(pkgutil.resolve_name(f"vllm.v1.{owner}"), method, lambda self: None)
    hooked = module.Scheduler if part == "engine core" else module.GPUModelRunner
    with pytest.raises(RuntimeError, match=rf"needs \({part}\): .*{method} takes \(\), but"):
        hooked()
    unchanged = hooked(WithoutMars)
    unchanged.load_model()
    assert unchanged.loaded and vars(unchanged).keys() == {"vllm_config", "loaded"}


def test_adaptive_verification_is_checked_if_it_is_on(monkeypatch):
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    class Adaptive(Config):
        speculative_config = SimpleNamespace(enable_adaptive_verification=True)

    class Fixed(Config):
        speculative_config = SimpleNamespace(enable_adaptive_verification=False)

    module = type(sys)("stand_in_module")
    module.GPUModelRunner = type("GPUModelRunner", (StandIn,), {})
    hooks.patch_runner_v2(module)
    module.GPUModelRunner(Adaptive)
    monkeypatch.setattr(OnlineAcceptanceEstimator, "step", lambda self, tokens: None)
    module.GPUModelRunner(Fixed)
    with pytest.raises(
        RuntimeError,
        match=r"\(adaptive verification\): .*Estimator.step takes \(tokens\), but \(idx_mapping, .*"
        r"or drop enable_adaptive_verification\.$",
    ):
        module.GPUModelRunner(Adaptive)


def test_a_hook_that_finds_nothing_to_wrap(monkeypatch, caplog):
    """Without MARS the server starts; with MARS the check refuses it."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    module = type(sys)("stand_in_module")
    module.GPUModelRunner = type("GPUModelRunner", (), {})
    hooks.patch_runner_v2(module)
    assert "vllm-mars cannot hook into stand_in_module (" in caplog.text
    assert "this vLLM can serve only without rejection_sample_method 'mars'" in caplog.text
