"""Settings and fixtures of all tests."""

import os
from pathlib import Path

import pytest

import interpreter
import leftovers

# Must be set before vLLM or a Hugging Face library is imported. Child servers inherit them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# Compilation, as for an engine's first logprobs, takes longer than it saves.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
# Engine core and worker share a process.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# One thread on any core: on busy cores, threads that wait for each other make a tiny model 30 times
# slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Lets tests send functions to an engine's workers.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


LEFT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT] = []
    if not hasattr(config, "workerinput"):
        leftovers.begin()
    interpreter.configure(config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Collects the leftovers of a pytest-xdist worker."""
    node.config.stash[LEFT] += getattr(node, "workeroutput", {}).get("left", [])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run that leaves processes or files."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = leftovers.children()
        return
    left = session.config.stash[LEFT]
    left += leftovers.end()
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if left := config.stash[LEFT]:
        terminalreporter.section("left behind by this run", red=True, bold=True)
        for line in left:
            terminalreporter.line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the slowest files first: those with interpreted tests, then those with engines.

    A file stays on one xdist worker. Files that share an engine set the same
    `pytest.mark.xdist_group("name")`.
    """
    first = {
        name: {item.path for item in items if item.get_closest_marker(name)}
        for name in ("interpreted", "engine")
    }
    # Files stay whole, so that module fixtures are set up once.
    items.sort(key=lambda item: [item.path not in paths for paths in first.values()])
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session")
def packaged_model() -> Path:
    """Directory of SmolLM2-135M-Instruct, created on first use."""
    from vllm_mars.models.packaged_model import ensure_model

    return ensure_model()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """Read-only directory "tiny" of a Llama with random weights and a tokenizer."""
    import tiny_models

    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_models.llama(directory)
    tiny_models.tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def lossy_server(packaged_model, tmp_path_factory):
    """Server of the group "lossy_server": theta 0.3, or a larger one by request."""
    from engines import LOSSY, packaged_server

    arguments = [
        # Cached prefills round differently, and tests compare tokens.
        "--no-enable-prefix-caching",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
        "--enable-scale-out",
        # A small model would fill an answer with whitespace.
        "--structured-outputs-config",
        '{"backend": "xgrammar", "disable_any_whitespace": true}',
    ]
    directory = tmp_path_factory.mktemp("server")
    (overrides := directory / "overrides.json").write_text("{}")
    env = {"VLLM_MARS_OVERRIDES": str(overrides), "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with packaged_server(packaged_model, LOSSY, directory, *arguments, **env) as running:
        yield running


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory) -> Path:
    """Read-only directory of a Llama as in `tiny_model`, whose tokens are bytes."""
    import tiny_models

    directory = tmp_path_factory.mktemp("models") / "bytes"
    tiny_models.llama(directory, added=0.001)
    tiny_models.tokenizer(directory, of_bytes=True)
    return directory


@pytest.fixture(scope="session")
def bounded_server(bytes_model, tmp_path_factory):
    """Server of the group "bounded_server": the recommended setting."""
    from engines import BOUNDED, open_server

    with open_server(bytes_model, BOUNDED, tmp_path_factory.mktemp("bounded")) as running:
        yield running


@pytest.fixture(scope="session")
def opt_in_server(packaged_model, tmp_path_factory):
    """Server of the group "opt_in_server": strict unless a request opts in (docs/serving.md)."""
    from engines import OPT_IN, packaged_server
    from vllm_mars.models.draft_head import PACKAGED_HEAD
    from vllm_mars.models.drafts import speculative_config

    config = speculative_config(str(PACKAGED_HEAD), 3, **OPT_IN)
    whole = "--no-enable-prefix-caching"
    with packaged_server(
        packaged_model, config, tmp_path_factory.mktemp("opt_in"), whole
    ) as server:
        yield server


@pytest.fixture(scope="session")
def registered_kernels():
    """Registers vLLM's CPU kernels for sampling, as at the start of an engine."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


@pytest.fixture
def mended_kernels(registered_kernels):
    """Mends these kernels for each test, since an engine in the process registers them again."""
    from vllm_on_cpu import mend

    mend()


@pytest.fixture
def clean_registry():
    """Removes vLLM's metrics from Prometheus's registry before and after a test."""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()
