"""The list of what is used of vLLM: against its releases, and against our own sources."""

import ast
import importlib
import inspect
import json
from pathlib import Path

import pytest

from vllm_mars.engine import compat
from vllm_mars.engine.compat import Symbol
from vllm_mars.engine.interfaces import INTERFACES
from vllm_mars.plugin import HOOKS

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "tests/interfaces"
# With Model Runner V2, and the oldest, which has the V1 runner alone.
SUPPORTED = ("0.32.0", "0.33.0")
OLDEST = "0.26.0"
OF_V1 = ("options", "markers", "requests", "scheduler", "metrics", "executor", "V1")


def read_table(release):
    rows = json.loads((TABLES / f"vllm-{release}.json").read_text())
    return {key: Symbol(**row) for key, row in rows.items()}


def differences(release, group):
    table = read_table(release)
    return {
        f"{module}:{name}": found
        for module, name, touch in compat.touches(group)
        if (found := compat.difference(touch, table.get(f"{module}:{name}")))
    }


@pytest.mark.parametrize("group", INTERFACES)
@pytest.mark.parametrize("release", SUPPORTED)
def test_supported_releases_have_what_is_needed(release, group):
    assert differences(release, group) == {}


@pytest.mark.parametrize("group", OF_V1)
def test_the_oldest_release_has_what_v1_needs(group):
    assert differences(OLDEST, group) == {}


def test_the_oldest_release_differs_in_v2():
    """The same check on a release whose V2 sampler is built otherwise: it must see that."""
    sampler = "vllm.v1.worker.gpu.sample.sampler:Sampler"
    rejection_sampler = "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler"
    found = differences(OLDEST, "V2")
    assert {key for key in found if "logits_processor.interface" not in key} == {
        f"{sampler}.apply_sampling_params",
        f"{sampler}.logits_processors",
        f"{sampler}.needs_logits_processing",
        f"{rejection_sampler}._get_logprobs_tensors",
        f"{rejection_sampler}._verify",
    }
    assert found[f"{rejection_sampler}._verify"] == "is missing"
    assert (
        "(logits, expanded_idx_mapping, idx_mapping_np, "
        in found[f"{sampler}.apply_sampling_params"]
    )


def test_there_is_a_table_for_both_ends():
    ends = tuple(tuple(map(int, end.split(".")[:2])) for end in (OLDEST, SUPPORTED[-1]))
    assert ends == compat.SUPPORTED


def installed_release():
    import vllm

    release = vllm.__version__.split("+")[0]
    if not (TABLES / f"vllm-{release}.json").exists():
        pytest.skip(f"needs a table of vLLM {release}: python tests/interfaces/write.py")
    return release


@pytest.mark.parametrize("group", INTERFACES)
def test_the_installed_vllm_is_seen_as_the_table_has_it(group):
    table = read_table(installed_release())
    for module, name, touch in compat.touches(group):
        found = compat.installed_symbol(module, name, touch)
        expected = table[f"{module}:{name}"]
        assert found is not None, f"{module}.{name}"
        assert found.parameters == expected.parameters, f"{module}.{name}"
        if touch.use != "exists":
            assert found.kind == expected.kind, f"{module}.{name}"


def our_sources():
    """The product: the laboratory asks vLLM through its servers and command line."""
    package = ROOT / "vllm_mars"
    return sorted(set(package.rglob("*.py")) - set(package.glob("experiments/**/*.py")))


def test_every_import_of_vllm_is_listed():
    """The list cannot fall behind: what our sources import from vLLM is in it."""
    listed = {(m, n) for group in INTERFACES for m, n, _ in compat.touches(group)}
    modules = {module for module, _ in listed}
    for source in our_sources():
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    assert (node.module, alias.name) in listed, f"{source.name}: {alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "vllm":
                        assert alias.name in modules, f"{source.name}: {alias.name}"


def test_every_hook_is_listed():
    listed = {
        f"{module}.{name}" for group in INTERFACES for module, name, _ in compat.touches(group)
    }
    wrapped = {}
    for node in ast.parse((ROOT / "vllm_mars/engine/hooks.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("patch_"):
            wrapped[node.name] = [
                call.args[1].value
                for call in ast.walk(node)
                if isinstance(call, ast.Call)
                and ast.unparse(call.func) in ("_after", "wrapt.patch_function_wrapper")
            ]
    owners, hooked = zip(*(hook.split(":") for hook in HOOKS.values()), strict=True)
    assert set(owners) == {"vllm_mars.engine.hooks"}
    assert set(hooked) == set(wrapped)
    # That hook wraps nothing: it gives classes one more field.
    assert {hook for hook, names in wrapped.items() if not names} == {"patch_stats"}
    for module, hook in zip(HOOKS, hooked, strict=True):
        for name in wrapped[hook]:
            assert f"{module}.{name}" in listed, hook
        # The hook would never run if the module were gone, so its place is in the list as well.
        assert module in listed or module == "vllm.engine.arg_utils", hook


def our_subclasses():
    """Each class of ours that is derived from one of vLLM's, with that class."""
    for source in our_sources():
        name = source.relative_to(ROOT).with_suffix("").parts
        module = importlib.import_module(".".join(name).removesuffix(".__init__"))
        for ours in vars(module).values():
            if inspect.isclass(ours) and ours.__module__ == module.__name__:
                for base in ours.__bases__:
                    if base.__module__.startswith("vllm."):
                        yield ours, base


def test_every_override_is_listed_with_our_parameters():
    checked = set()
    for ours, base in our_subclasses():
        overridden = {
            f"{base.__name__}.{name}": ", ".join(list(inspect.signature(member).parameters)[1:])
            for name, member in vars(ours).items()
            if inspect.isfunction(member) and hasattr(base, name) and name != "__init__"
        }
        listed = {
            name: touch.parameters
            for group in INTERFACES
            for module, name, touch in compat.touches(group)
            if module == base.__module__ and touch.use == "override"
        }
        assert overridden == listed, ours
        checked.add(ours.__name__)
    assert {"MarsRejectionSampler", "MarsRejectionSamplerV2"} <= checked
