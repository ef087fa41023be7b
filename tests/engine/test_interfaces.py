"""The list of what is used of vLLM, against our own sources: all that is used, and nothing else.

What the walk of the sources sees are names, not types: that an attribute is read which a listed
class of vLLM has, or that a listed name is mentioned at all. It misses an attribute of a class that
the list does not name, and one whose name is listed for another class. `test_compat.py` holds the
list against the installed vLLM.
"""

import ast
import functools
import importlib
import inspect
from pathlib import Path

from vllm_mars.engine.interfaces import INTERFACES
from vllm_mars.plugin import HOOKS

ROOT = Path(__file__).parents[2]
LISTED = [
    (module, use) for group in INTERFACES.values() for module, uses in group.items() for use in uses
]
# Attributes in our sources that have the name of one of vLLM's and are another object's.
OTHERS = {
    *("_fields", "_replace", "arange", "clone", "discard", "dtype", "error", "func", "prompt"),
    *("_sample", "observe", "output_token_ids", "stop", "update", "value"),
}
# Held by the `KernelOverride` objects through which they are mended.
UNNAMED = {"_expand_kernel_impl", "_rejection_random_sample_kernel_impl"}


def our_sources():
    """The product: the laboratory asks vLLM through its servers and command line."""
    package = ROOT / "vllm_mars"
    return sorted(set(package.rglob("*.py")) - set(package.glob("experiments/**/*.py")))


def nodes(kind, sources=None):
    """Nodes of our sources, but for imports that are made for types alone."""
    for source in our_sources() if sources is None else sources:
        tree = ast.parse(source.read_text())
        typing = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        yield from (n for n in ast.walk(tree) if isinstance(n, kind) and id(n) not in typing)


def imported():
    """(module, name) of each import from vLLM."""
    return {
        (node.module, alias.name)
        for node in nodes(ast.ImportFrom)
        if (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


def attributes(sources=None):
    """Names that are read or set of any object, also by `getattr` and the like."""
    found = {node.attr for node in nodes(ast.Attribute, sources)}
    for node in nodes(ast.Call, sources):
        if ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return found


def hooked():
    """(module, "Class.method") of each method that a hook wraps, by the hook."""
    wrapped = {}
    for node in ast.parse((ROOT / "vllm_mars/engine/hooks.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("patch_"):
            wrapped[node.name] = [
                call.args[1].value
                for call in ast.walk(node)
                if isinstance(call, ast.Call)
                and ast.unparse(call.func) in ("_after", "_tell", "wrapt.patch_function_wrapper")
            ]
    owners, hooks = zip(*(hook.split(":") for hook in HOOKS.values()), strict=True)
    assert set(owners) == {"vllm_mars.engine.hooks"}
    assert set(hooks) == set(wrapped)
    # These wrap nothing: they give classes one more field, or another.
    nothing = {hook for hook, names in wrapped.items() if not names}
    assert nothing == {"patch_stats", "patch_output_processor"}
    return {
        (module, name) for module, hook in zip(HOOKS, hooks, strict=True) for name in wrapped[hook]
    }


@functools.cache
def classes(module):
    """The source of each class of a module of vLLM."""
    tree = ast.parse(Path(importlib.import_module(module).__file__).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def members(owner):
    """What a class of vLLM has, its instances' own attributes among it."""
    found = set()
    for base in owner.__mro__:
        if base.__module__.startswith("vllm."):
            found |= {*vars(base), *vars(base).get("__annotations__", ())}
            for node in ast.walk(classes(base.__module__).get(base.__name__, ast.Pass())):
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
                    found.add(node.attr)
    return found


def our_subclasses():
    """Each class of ours that is derived from one of vLLM's, with that class."""
    for source in (ROOT / "vllm_mars/runner").glob("*.py"):
        name = source.relative_to(ROOT).with_suffix("").parts
        module = importlib.import_module(".".join(name).removesuffix(".__init__"))
        for ours in vars(module).values():
            if inspect.isclass(ours) and ours.__module__ == module.__name__:
                for base in ours.__bases__:
                    if base.__module__.startswith("vllm."):
                        yield ours, base


def test_what_is_imported_and_hooked_is_listed():
    listed = {(module, use.name) for module, use in LISTED}
    owners = {(module, name.split(".")[0]) for module, name in listed}
    assert imported() <= listed | owners
    assert hooked() <= listed
    modules = {module for module, _ in listed}
    for node in nodes(ast.Import):
        for alias in node.names:
            assert alias.name.split(".")[0] != "vllm" or alias.name in modules, alias.name
    # A hook would never run if its module were gone, so that module is in the list as well.
    for module in HOOKS:
        assert tuple(module.rsplit(".", 1)) in listed or module == "vllm.engine.arg_utils"


def test_attributes_that_a_listed_class_has_are_listed():
    """In what runs inside of vLLM."""
    folders = [(ROOT / "vllm_mars" / name).glob("*.py") for name in ("engine", "runner")]
    read = attributes([source for folder in folders for source in folder])
    listed = {part for _, use in LISTED for part in use.name.split(".")}
    owners = [
        getattr(importlib.import_module(module), name, None)
        for module, name in {(module, use.name.split(".")[0]) for module, use in LISTED}
    ]
    missing = {
        f"{owner.__name__}.{name}"
        for owner in filter(inspect.isclass, owners)
        for name in read & members(owner) - listed - OTHERS
        if not name.startswith("__")
    }
    assert missing == set()


def test_nothing_is_listed_that_is_not_used():
    from_vllm, by_hook = imported(), hooked()
    # Some names are read in a loop over them.
    texts = {node.value for node in nodes(ast.Constant) if isinstance(node.value, str)}
    mentioned = attributes() | texts
    # vLLM's modules that a hook gets, and what it takes from them.
    modules = {tuple(module.rsplit(".", 1)) for module in HOOKS}
    for module, use in LISTED:
        owner, _, member = use.name.rpartition(".")
        if use.how == "override" or use.name in UNNAMED:
            continue
        if use.how == "call" and member in ("__init__", "forward"):
            assert (module, owner) in from_vllm, use
        elif owner:
            assert member in mentioned or (module, use.name) in by_hook, (module, use)
        else:
            assert (module, member) in from_vllm | modules or member in mentioned, (module, use)


def test_calls_are_listed_as_they_are_made():
    """Each listed call is made with so many positional and these named arguments."""
    made = {}
    for node in nodes(ast.Call):
        shape = len(node.args), frozenset(keyword.arg for keyword in node.keywords)
        name = ast.unparse(node.func).rpartition(".")[2]
        made.setdefault(name, set()).add(shape)
    for _, use in LISTED:
        if use.how == "call":
            positional, _, named = (
                part.replace(",", " ").split() for part in use.parameters.partition("*")
            )
            # `forward` is what calling a module of torch runs.
            name = use.name.rpartition(".")[2].replace("forward", "sampler")
            assert (len(positional), frozenset(named)) in made.get(name, ()), use


def test_every_override_is_listed_with_our_parameters():
    checked = set()
    for ours, base in our_subclasses():
        overridden = {
            f"{base.__name__}.{name}": ", ".join(list(inspect.signature(member).parameters)[1:])
            for name, member in vars(ours).items()
            if inspect.isfunction(member) and hasattr(base, name) and name != "__init__"
        }
        listed = {
            use.name: use.parameters
            for module, use in LISTED
            if module == base.__module__ and use.how == "override"
        }
        assert overridden == listed, ours
        checked.add(ours.__name__)
    assert {"MarsRejectionSampler", "MarsRejectionSamplerV2"} <= checked
