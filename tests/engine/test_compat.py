"""The installed vLLM is compared with the list of what is used of it, before that is used."""

import importlib.util
import logging
import re
import subprocess
import sys

import pytest

from vllm_mars import MarsConfig
from vllm_mars.engine import compat, hooks
from vllm_mars.engine.interfaces import INTERFACES, Use
from vllm_mars.engine.options import take_options
from vllm_mars.engine.ranks import TravellingOptions

REJECTION_SAMPLER = "vllm.v1.sample.rejection_sampler"


@pytest.mark.parametrize("group", INTERFACES)
def test_the_installed_vllm_passes(group):
    compat.check_interfaces(group)


def changed_forward(self, metadata, draft_probs, logits, sampling_metadata, step):
    """Stands in for a method of a future vLLM, which takes one argument more."""


def test_a_changed_signature_is_refused(monkeypatch):
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    monkeypatch.setattr(RejectionSampler, "forward", changed_forward)
    with pytest.raises(RuntimeError) as refused:
        compat.check_interfaces("V1")
    import vllm

    assert str(refused.value) == (
        f"vLLM {vllm.__version__} has other interfaces than vllm-mars needs (V1): "
        f"{REJECTION_SAMPLER}.RejectionSampler.forward has parameters (metadata, draft_probs, "
        "logits, sampling_metadata, step), but (metadata, draft_probs, logits, sampling_metadata) "
        "are overridden. Install a vLLM that it knows (0.32 and 0.33), look for a newer "
        "vllm-mars, or drop rejection_sample_method 'mars'."
    )


def test_all_that_is_missing_is_named(monkeypatch):
    from vllm.v1.sample import rejection_sampler

    monkeypatch.delattr(rejection_sampler, "apply_sampling_constraints")
    monkeypatch.setattr(rejection_sampler.RejectionSampler, "__init__", lambda self: None)
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.thinking_budget_state", None)
    # A class has become a function.
    monkeypatch.setattr("vllm.v1.sample.sampler.Sampler", lambda: None)
    with pytest.raises(RuntimeError) as refused:
        compat.check_interfaces("V1")
    for missing in (
        f"{REJECTION_SAMPLER}.apply_sampling_constraints is missing",
        f"{REJECTION_SAMPLER}.RejectionSampler.use_fp64_gumbel is missing",
        f"{REJECTION_SAMPLER}.RejectionSampler.__init__ has parameters (), but (sampler, spec_con",
        "thinking_budget_state.ThinkingBudgetStateHolder.has_tracked_requests is missing",
        "vllm.v1.sample.sampler.Sampler.forward is missing",
    ):
        assert missing in str(refused.value)


@pytest.mark.parametrize(
    ("how", "needed", "parameters", "fits"),
    [
        ("override", "a, b", "a, b=", True),
        ("override", "a, b", "b, a", False),
        ("override", "a, b", "a, b, c=", False),
        ("override", "a, b", "a", False),
        ("call", "a, b", "a, b, c=, *args, d=, **kwargs", True),
        ("call", "a, b", "a, c=, b=", False),
        ("call", "a, b", "a, b, c", False),
        ("call", "a, b", "a, b, *, c", False),
        ("call", "a, *, c", "a, b=, c=", True),
        ("call", "a, *, c", "a, *, c", True),
        ("call", "a, *, c", "a, **kwargs", False),
        ("call", "*, a, b", "b, a", True),
        ("call", "", "", True),
        ("call", "", "a", False),
        ("wrap", "a", "a, b, *, c", True),
        ("wrap", "a", "b, a", False),
        ("wrap", "", "a, b", True),
    ],
)
def test_uses(how, needed, parameters, fits):
    found = compat.unlike(Use("f", how, needed), parameters)
    if fits:
        assert found is None
    else:
        assert found.startswith(f"has parameters ({parameters}), but ({needed}) are ")


@pytest.mark.parametrize("version", ["0.31.9", "0.8.5.post1", "dev"])
def test_older_and_unreadable_versions_are_refused(version):
    with pytest.raises(RuntimeError, match=f"vLLM {version} is not supported .* 0.32 and 0.33"):
        compat.check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1.dev3+cpu"])
def test_supported_versions_pass_in_silence(warnings, version):
    compat.check_version(version)
    assert not warnings


def test_a_vllm_that_ray_cannot_serve_is_refused():
    """As 0.33 is, which has no such module."""
    pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    program = (
        "import sys; sys.modules['vllm.entrypoints.launchers.cli_args'] = None;"
        "import vllm_mars.serve"
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


class Model:
    def get_vocab_size(self):
        return 100


@pytest.fixture
def warnings(monkeypatch):
    """The warnings of `compat`, each with its arguments filled in."""
    import vllm.logger

    given = []

    class Logger:
        def warning_once(self, text, *arguments):
            given.append(text % arguments)

    monkeypatch.setattr(vllm.logger, "init_logger", lambda name: Logger())
    return given


@pytest.mark.parametrize("version", ["0.34.0", "1.0"])
def test_a_newer_version_with_the_same_interfaces_is_warned_of(monkeypatch, warnings, version):
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    options = Options()
    take_options(options, Model())
    assert options.additional_config["mars"].config.theta == 0.9
    assert warnings == [
        f"vLLM {version} is newer than the releases that vllm-mars knows (0.32 and 0.33); its "
        "interfaces are checked at start, its behaviour is untested."
    ]


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logits"])
def test_logprobs_of_what_is_served_need_them(mode):
    options = Options()
    options.speculative_config["mars_logprobs"], options.logprobs_mode = "sampled", mode
    with pytest.raises(
        ValueError,
        match="mars_logprobs='sampled' needs the logprobs of what requests sample from, but "
        f"logprobs_mode is '{mode}'; add --logprobs-mode processed_logprobs.",
    ):
        take_options(options, Model())


@pytest.mark.parametrize("version", ["0.33.0", "0.34.0"])
def test_a_version_with_other_interfaces_is_refused(monkeypatch, warnings, version):
    import vllm
    from vllm.config.model import ModelConfig

    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(ModelConfig, "get_vocab_size", lambda self, parallel_config: 0)
    options = Options()
    with pytest.raises(
        RuntimeError,
        match=rf"vLLM {version} has other interfaces than vllm-mars needs \(options\): .*"
        r"ModelConfig.get_vocab_size has parameters \(parallel_config\), but \(\) are passed",
    ):
        take_options(options, Model())
    assert "mars" not in options.additional_config


class Config:
    additional_config = {"mars": TravellingOptions(MarsConfig(theta=0.9))}


class Unasked:
    additional_config = {}


class Runner:
    """Stands in for a model runner of vLLM; records what was done to it."""

    def __init__(self, config=Config):
        self.vllm_config = config
        self.rejection_sampler = None
        self.loaded = False

    def load_model(self):
        self.loaded = True


def runner_module(runner):
    module = type(sys)("stand_in_runner")
    module.GPUModelRunner = type("GPUModelRunner", (runner,), {})
    return module


def test_the_v2_hook_checks_before_the_model_is_loaded(monkeypatch):
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    module = runner_module(Runner)
    hooks.patch_runner_v2(module)
    monkeypatch.setattr(Sampler, "apply_sampling_params", lambda self, logits: logits)
    message = r"needs \(V2\): .*Sampler.apply_sampling_params has"
    with pytest.raises(RuntimeError, match=message):
        module.GPUModelRunner()

    unasked = module.GPUModelRunner(Unasked)
    unasked.load_model()
    assert unasked.loaded


@pytest.mark.parametrize(
    ("group", "owner", "name"),
    [
        ("V1", "vllm.v1.sample.rejection_sampler", "rejection_sample"),
        ("cpu", "vllm.utils.cpu_triton_utils", "_expand_kernel_impl"),
    ],
)
def test_the_v1_hook_checks_before_a_sampler_is_replaced(monkeypatch, group, owner, name):
    from vllm.platforms import current_platform

    if group == "cpu" and not current_platform.is_cpu():
        pytest.skip("needs vLLM's CPU build")
    module = runner_module(Runner)
    hooks.patch_runner_v1(module)
    monkeypatch.delattr(importlib.import_module(owner), name)
    with pytest.raises(RuntimeError, match=rf"needs \({group}\): .*{owner}.{name} is missing"):
        module.GPUModelRunner()


@pytest.mark.parametrize(
    ("group", "hook", "owner", "name"),
    [
        ("scheduler", "patch_scheduler", "core.sched.scheduler", "Scheduler.update_from_output"),
        ("metrics", "patch_stat_loggers", "metrics.loggers", "PrometheusStatLogger.record"),
        ("metrics", "patch_stat_loggers", "metrics.loggers", "LoggingStatLogger.record"),
    ],
)
def test_the_hooks_of_the_metrics_check_first(monkeypatch, group, hook, owner, name):
    from vllm.v1.metrics.stats import SchedulerStats

    module = type(sys)("stand_in_metrics")
    module.SchedulerStats = SchedulerStats
    for stand_in in ("Scheduler", "PrometheusStatLogger", "LoggingStatLogger"):
        setattr(module, stand_in, type(stand_in, (Runner,), {}))
    getattr(hooks, hook)(module)
    class_name, method = name.split(".")
    vllm_class = getattr(importlib.import_module(f"vllm.v1.{owner}"), class_name)
    monkeypatch.setattr(vllm_class, method, lambda self, step: None)
    with pytest.raises(RuntimeError, match=rf"needs \({group}\): .*{name} has parameters \(step\)"):
        getattr(module, class_name)()
    unasked = getattr(module, class_name)(Unasked)
    assert vars(unasked).keys() == {"vllm_config", "rejection_sampler", "loaded"}


def test_a_hook_that_finds_nothing_to_wrap(monkeypatch, caplog):
    """A server without MARS goes on, one with it is refused."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    module = runner_module(object)
    hooks.patch_runner_v2(module)
    assert "vllm-mars cannot hook into stand_in_runner (" in caplog.text
    assert "this vLLM can serve only without rejection_sample_method 'mars'" in caplog.text

    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    monkeypatch.delattr(GPUModelRunner, "load_model")
    without_load_model = runner_module(type("Stripped", (), {"__init__": Runner.__init__}))
    hooks.patch_runner_v2(without_load_model)
    with pytest.raises(RuntimeError, match="GPUModelRunner.load_model is missing"):
        without_load_model.GPUModelRunner()
