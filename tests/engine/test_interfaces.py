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
SUPPORTED = ("0.32.0", "0.33.0")


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


def test_there_is_a_table_of_each_supported_release():
    assert tuple(tuple(map(int, end.split(".")[:2])) for end in SUPPORTED) == compat.SUPPORTED


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
    # These wrap nothing: they give classes one more field, or another.
    assert {hook for hook, names in wrapped.items() if not names} == {
        *("patch_output_processor", "patch_stats")
    }
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
