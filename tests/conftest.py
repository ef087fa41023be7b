"""Settings and fixtures that all tests share."""

import os
from pathlib import Path

import pytest

import interpreter
import leftovers

# Before anything imports vLLM or a Hugging Face library. Child servers inherit them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# Compiling anything, as for the first logprobs of an engine, takes longer than what it speeds up.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
# Engine core and worker share a process: this one, or in a server one beside the API's.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Engines of one thread on any core: on busy cores, threads that wait for each other make a tiny
# model 30 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Lets a test hand a function to an engine's workers.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


LEFT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT] = []
    if not hasattr(config, "workerinput"):
        leftovers.begin()
    interpreter.configure(config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """A worker of pytest-xdist has told what it leaves behind."""
    node.config.stash[LEFT] += getattr(node, "workeroutput", {}).get("left", [])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that leaves something behind fails."""
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
    """Files that take longest come first: those with interpreted tests, then those with engines.

    A file stays on one worker of xdist. Files that share an engine name a group of their own:
    `pytest.mark.xdist_group("name")`.
    """
    first = {
        name: {item.path for item in items if item.get_closest_marker(name)}
        for name in ("interpreted", "engine")
    }
    # Whole files, or what a module's fixtures hold would be built twice.
    items.sort(key=lambda item: [item.path not in paths for paths in first.values()])
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session")
def packaged_model() -> Path:
    """Directory of SmolLM2-135M-Instruct, made on first use."""
    from vllm_mars.models.packaged_model import ensure_model

    return ensure_model()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """Directory "tiny" of a Llama with random weights and a tokenizer; not to be written to."""
    import tiny_models

    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_models.llama(directory)
    tiny_models.tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def lossy_server(packaged_model, tmp_path_factory):
    """The server of the group "lossy_server": theta 0.3, or a larger one by request."""
    from engines import LOSSY, packaged_server

    arguments = [
        # Chunked or cached prefills round differently; tokens are compared.
        "--no-enable-prefix-caching",
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out"),
        # Or a small model fills an answer with whitespace.
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    ]
    directory = tmp_path_factory.mktemp("server")
    (overrides := directory / "overrides.json").write_text("{}")
    env = {"VLLM_MARS_OVERRIDES": str(overrides), "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with packaged_server(packaged_model, LOSSY, directory, *arguments, **env) as running:
        yield running


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory) -> Path:
    """Directory of a Llama as in `tiny_model`, whose tokens are bytes; not to be written to."""
    import tiny_models

    directory = tmp_path_factory.mktemp("models") / "bytes"
    tiny_models.llama(directory, added=0.001)
    tiny_models.tokenizer(directory, of_bytes=True)
    return directory


@pytest.fixture(scope="session")
def bounded_server(bytes_model, tmp_path_factory):
    """The server of the group "bounded_server": the recommended setting."""
    from engines import BOUNDED, open_server

    with open_server(bytes_model, BOUNDED, tmp_path_factory.mktemp("bounded")) as running:
        yield running


@pytest.fixture(scope="session")
def opt_in_server(packaged_model, tmp_path_factory):
    """The server of the group "opt_in_server": strict unless a request asks (docs/serving.md)."""
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
    """vLLM's CPU kernels for sampling, as an engine that starts registers them."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


@pytest.fixture
def mended_kernels(registered_kernels):
    """These kernels, mended; of each test, since an engine in the process registers them again."""
    from vllm_on_cpu import mend

    mend()


@pytest.fixture
def clean_registry():
    """No metric of vLLM in Prometheus's registry, before and after."""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()
