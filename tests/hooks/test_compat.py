"""A vLLM that lacks what this project hooks into is refused, before anything is replaced."""

import importlib
import logging
import pkgutil
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vllm_mars import MarsConfig, releases
from vllm_mars.hooks import compat
from vllm_mars.hooks import patches as hooks
from vllm_mars.hooks.arguments import take_options
from vllm_mars.hooks.pickled import TravellingOptions


def test_all_that_is_missing_is_named(monkeypatch):
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
    for found in (
        f"{runner}:GPUModelRunner.load_model is missing",
        "vllm.v1.worker.gpu.states:RequestState.add_request is missing (import of",
        "RejectionSampler.__call__ takes (logits, step), but (logits, input_batch, draft_logits, ",
        "RejectionSampler._get_logprobs_tensors takes (logits), but (sampled, num_sampled, ",
        "has no attribute '_verify'",
        "BaseSpeculator.propose takes (input_batch), but (input_batch, ..., temperature, seeds, ",
    ):
        assert found in text
    assert text.endswith(
        "Install a vLLM that it knows (0.32 and 0.33), look for a newer vllm-mars, or drop "
        "rejection_sample_method 'mars'."
    )


PARTS = [(part, name) for part, needed in compat.NEEDED.items() for name in needed]


@pytest.mark.parametrize("names", [0, 1])
@pytest.mark.parametrize(("part", "name"), PARTS)
def test_a_plugin_that_wraps_without_functools_wraps_is_served_beside(
    monkeypatch, part, name, names
):
    """It hands on whatever it gets, and names none or the first of vLLM's parameters."""
    place, method = re.fullmatch(r"(.*)[.:](\w+)", name).groups()
    owner = pkgutil.resolve_name(place)
    by_place = compat.NEEDED[part][name].partition("...")[0]
    first = "".join(f"{it}, " for it in by_place.split(", ")[:names] if it)
    wrapper = eval(
        f"lambda self, {first}*a, _old=old, **k: _old(self, {first}*a, **k)",
        {"old": getattr(owner, method)},
    )
    monkeypatch.setattr(owner, method, wrapper)
    compat.check_interfaces(part)


def test_a_plugin_that_wraps_wrongly_is_named(monkeypatch):
    from vllm.v1.engine.input_processor import InputProcessor

    monkeypatch.setattr(InputProcessor, "_validate_params", lambda self, own, *a, **k: None)
    with pytest.raises(
        RuntimeError,
        match=r"_validate_params takes \(own, a, k\), but \(params\) come first here. Leave "
        rf"out the plugin that replaces vLLM's own there \({__name__}\), or drop ",
    ):
        compat.check_interfaces("front end")


def test_a_module_whose_hook_would_never_run(monkeypatch):
    monkeypatch.setitem(compat.HOOKS, "vllm.v1.worker.gone.runner", "")
    with pytest.raises(RuntimeError, match=r"\(front end\): vllm.v1.worker.gone.runner is missing"):
        compat.check_interfaces("front end")


@pytest.mark.parametrize("version", ["0.31.9", "0.8.5.post1", "dev"])
def test_older_and_unreadable_versions_are_refused(version):
    with pytest.raises(RuntimeError, match=f"vLLM {version} is not supported .* 0.32 and 0.33"):
        releases.check_version(version)


def test_a_vllm_that_ray_cannot_serve_is_refused():
    """As 0.33 is, which has no such module."""
    pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    program = (
        "import sys; sys.modules['vllm.entrypoints.launchers.cli_args'] = None;"
        "import vllm_mars.ray_serve"
    )
    refused = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert re.search(r"Error: Ray .* cannot serve vLLM .*Ray 2.60 goes with vLLM", refused.stderr)
    assert "install vLLM 0.32 on every node, or run `vllm serve` for each" in refused.stderr


class Options:
    """Stands in for vLLM's `EngineArgs`."""

    def __init__(self):
        mars = {"rejection_sample_method": "mars", "mars_theta": 0.9}
        self.speculative_config = {"method": "ngram", **mars}
        self.additional_config = {}
        self.reasoning_parser = self.reasoning_config = self.structured_outputs_config = None


class Model:
    def get_vocab_size(self):
        return 100


@pytest.fixture
def warnings(monkeypatch):
    """The warnings of `releases`, each with its arguments filled in."""
    import vllm.logger

    given, init_logger = [], vllm.logger.init_logger

    class Logger:
        def warning_once(self, text, *arguments):
            given.append(text % arguments)

    # Modules of vLLM that are imported meanwhile keep the logger that they get.
    monkeypatch.setattr(
        vllm.logger,
        "init_logger",
        lambda name: Logger() if name.endswith("vllm_mars.releases") else init_logger(name),
    )
    return given


def test_a_newer_version_with_the_same_interfaces_is_warned_of(monkeypatch, warnings):
    import vllm

    releases.check_version("0.33.1.dev3+cpu")
    assert not warnings
    monkeypatch.setattr(vllm, "__version__", version := "0.34.0")
    options = Options()
    take_options(options, Model())
    assert options.additional_config["mars"].config.theta == 0.9
    assert warnings == [
        f"vLLM {version} is newer than the releases that vllm-mars knows (0.32 and 0.33); its "
        "interfaces are checked at start, its behaviour is untested."
    ]


def test_logprobs_of_what_is_served_need_them():
    options, mode = Options(), "raw_logprobs"
    options.speculative_config["mars_logprobs"], options.logprobs_mode = "sampled", mode
    with pytest.raises(
        ValueError,
        match="mars_logprobs='sampled' needs the logprobs of what requests sample from, but "
        f"logprobs_mode is '{mode}'; add --logprobs-mode processed_logprobs.",
    ):
        take_options(options, Model())


def test_a_front_end_with_other_interfaces_is_refused(monkeypatch):
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    monkeypatch.setattr(PrometheusStatLogger, "record", lambda self, step: None)
    options = Options()
    message = r"\(front end\): .*PrometheusStatLogger.record takes \(step\), but \(scheduler_stats"
    with pytest.raises(RuntimeError, match=message):
        take_options(options, Model())
    assert "mars" not in options.additional_config


def test_a_server_with_other_interfaces_is_refused_at_start(monkeypatch):
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    method = "completion_stream_generator"
    monkeypatch.setattr(OpenAIServingCompletion, method, lambda self, request, results: None)
    module = type(sys)("vllm.entrypoints.openai.chat_completion.serving")
    generators = dict.fromkeys(("full", "stream"), lambda self: None)
    own = {f"chat_completion_{name}_generator": it for name, it in generators.items()}
    own["__init__"] = lambda self, engine_client: setattr(self, "engine_client", engine_client)
    module.OpenAIServingChat = type("OpenAIServingChat", (), own)
    hooks.patch_chat(module)
    module.OpenAIServingChat(SimpleNamespace(vllm_config=Unasked))
    message = rf"\(API server\): .*{method} takes \(request, results\), but \(request, engine_in"
    with pytest.raises(RuntimeError, match=message):
        module.OpenAIServingChat(SimpleNamespace(vllm_config=Config))


class Config:
    additional_config = {"mars": TravellingOptions(MarsConfig(theta=0.9))}


class Unasked:
    additional_config = {}


class StandIn:
    """Stands in for a class of vLLM whose `__init__` is hooked; records what was done to it."""

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
    place, name = owner.split(":")
    vllm_class = getattr(importlib.import_module(f"vllm.v1.{place}"), name)
    monkeypatch.setattr(vllm_class, method, lambda self: None)
    hooked = module.Scheduler if part == "engine core" else module.GPUModelRunner
    with pytest.raises(RuntimeError, match=rf"needs \({part}\): .*{method} takes \(\), but"):
        hooked()
    unasked = hooked(Unasked)
    unasked.load_model()
    assert unasked.loaded and vars(unasked).keys() == {"vllm_config", "loaded"}


def test_only_who_has_drafts_cut_needs_what_cuts_them(monkeypatch):
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    class Cut(Config):
        speculative_config = SimpleNamespace(enable_adaptive_verification=True)

    class Uncut(Config):
        speculative_config = SimpleNamespace(enable_adaptive_verification=False)

    module = type(sys)("stand_in_module")
    module.GPUModelRunner = type("GPUModelRunner", (StandIn,), {})
    hooks.patch_runner_v2(module)
    module.GPUModelRunner(Cut)
    monkeypatch.setattr(OnlineAcceptanceEstimator, "step", lambda self, tokens: None)
    module.GPUModelRunner(Uncut)
    with pytest.raises(
        RuntimeError,
        match=r"\(adaptive verification\): .*Estimator.step takes \(tokens\), but \(idx_mapping, .*"
        r"or drop enable_adaptive_verification\.$",
    ):
        module.GPUModelRunner(Cut)


def test_a_vllm_that_names_the_cutting_of_drafts_otherwise(monkeypatch):
    import vllm.config.speculative

    monkeypatch.setattr(vllm.config.speculative, "SpeculativeConfig", lambda *, is_cut: None)
    with pytest.raises(
        RuntimeError,
        match=r"\(V2\): vllm.config.speculative:SpeculativeConfig takes \(is_cut\), but \(..., ena",
    ):
        compat.check_interfaces("V2")


def test_a_hook_that_finds_nothing_to_wrap(monkeypatch, caplog):
    """A server without MARS goes on; one with it is refused by the check."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    module = type(sys)("stand_in_module")
    module.GPUModelRunner = type("GPUModelRunner", (), {})
    hooks.patch_runner_v2(module)
    assert "vllm-mars cannot hook into stand_in_module (" in caplog.text
    assert "this vLLM can serve only without rejection_sample_method 'mars'" in caplog.text
