"""All knowledge of vLLM releases: which are supported, and whether one fits.

`vllm_mars.engine.interfaces` is the one list of what this project touches in vLLM.
`check_interfaces` holds the installed vLLM against it before anything is replaced, and the tests
hold it against tables of several releases (tests/interfaces). Nothing here runs while tokens are
generated, and nothing of vLLM is imported until a check is asked for.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from vllm_mars.engine.interfaces import INTERFACES, Touch

# The oldest and the newest.
SUPPORTED = ((0, 32), (0, 33))
# The releases that the tests run on.
RUN = ((0, 32),)

_RELEASES = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)


class Symbol(NamedTuple):
    """What a release of vLLM has under a name.

    Attributes:
        kind: what it is.
        parameters: names without self in the notation of a signature; "=" marks a default, "*" the
            beginning of the keyword-only ones. Empty where nobody calls it.
    """

    kind: Literal["module", "class", "function", "method", "attribute"]
    parameters: str = ""


_MISSING = object()


def touches(group: str) -> Iterator[tuple[str, str, Touch]]:
    """Yields (module, name within it, use) of each symbol that a group of `INTERFACES` needs."""
    for module, uses in INTERFACES[group].items():
        for text in uses:
            owner, _, attributes = text.partition(": ")
            if attributes:
                for attribute in attributes.split(", "):
                    yield module, f"{owner}.{attribute}", Touch("exists")
            else:
                signature, _, parameters = text.removesuffix(")").partition("(")
                use: Any
                *use, name = signature.split()
                yield module, name, Touch(use[0] if use else "exists", parameters)


def check_version(version: str) -> None:
    """Refuses a vLLM that is too old and warns of one that is newer than any tested.

    Args:
        version: vLLM's version string, such as "0.32.0" or "0.33.1.dev3+cpu".

    Raises:
        RuntimeError: the version is below the oldest supported one, or cannot be read.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (release := (int(match[1]), int(match[2]))) < SUPPORTED[0]:
        raise RuntimeError(
            f"vLLM {version} is not supported by vllm-mars, which knows {_RELEASES}; "
            "install one of them or drop rejection_sample_method 'mars'."
        )
    if release > SUPPORTED[-1]:
        from vllm.logger import init_logger

        init_logger("vllm.vllm_mars.engine.compat").warning_once(
            "vLLM %s is newer than the releases that vllm-mars knows (%s); its interfaces are "
            "checked at start, its behaviour is untested.",
            version,
            _RELEASES,
        )


def check_interfaces(group: str) -> None:
    """Refuses an installed vLLM whose interfaces are not the ones that a group is written for.

    Takes less than a millisecond once the group's modules are imported.

    Args:
        group: a key of `INTERFACES`.

    Raises:
        RuntimeError: a symbol is missing or has other parameters; the message names every one.
    """
    differences = [
        f"{module}.{name} {found}"
        for module, name, touch in touches(group)
        if (found := difference(touch, installed_symbol(module, name, touch)))
    ]
    if differences:
        import vllm

        raise RuntimeError(
            f"vLLM {vllm.__version__} has other interfaces than vllm-mars needs ({group}): "
            f"{'; '.join(differences)}. Install a vLLM that it knows "
            f"({_RELEASES}), look for a newer vllm-mars, or drop rejection_sample_method 'mars'."
        )


def difference(touch: Touch, symbol: Symbol | None) -> str | None:
    """Says in words what is wrong with a symbol for a use of it, or None if nothing is.

    Args:
        touch: the use.
        symbol: what the release has, or None where it has nothing under that name.
    """
    if symbol is None:
        return "is missing"
    if touch.use == "exists":
        return None
    if symbol.kind in ("attribute", "module"):
        return f"is an attribute, but a function of ({touch.parameters}) is expected"
    present = _split(symbol.parameters)
    names = [name.rstrip("=") for name in present]
    positional, _, keyword = touch.parameters.partition("*")
    first, named = _split(positional), set(_split(keyword))
    if touch.use == "override":
        fits = names == first
    else:
        fits = names[: len(first)] == first
    if touch.use == "call":
        required = {name for name in present[len(first) :] if name[0] != "*" and name[-1] != "="}
        fits = fits and required <= named <= set(names[len(first) :])
    if fits:
        return None
    verb = {"override": "overridden", "call": "passed", "wrap": "read"}[touch.use]
    return f"has parameters ({symbol.parameters}), but ({touch.parameters}) are {verb}"


def _split(names: str) -> list[str]:
    return [name for name in (part.strip() for part in names.split(",")) if name]


def installed_symbol(module: str, name: str, touch: Touch) -> Symbol | None:
    """What the installed vLLM has under a name, or None where it has nothing.

    Args:
        module: the module; imported if it is not yet.
        name: name within the module, with dots for members of a class.
        touch: the use; parameters are read only where it has some.
    """
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    owner = None
    for part in name.split("."):
        owner = found
        found = getattr(owner, part, _MISSING)
        if found is _MISSING:
            return _undefined(owner, part)
    if inspect.isclass(found):
        kind: Literal["class", "method", "function"] = "class"
    elif callable(found) and touch.use != "exists":
        kind = "method" if inspect.isclass(owner) else "function"
    else:
        return Symbol("module" if inspect.ismodule(found) else "attribute")
    return Symbol(kind, "" if touch.use == "exists" else _parameters(found))


def _undefined(owner: Any, name: str) -> Symbol | None:
    """What is under a name that only an instance has, or a package that has not imported it yet."""
    if inspect.ismodule(owner):
        is_package = hasattr(owner, "__path__")
        found = is_package and importlib.util.find_spec(f"{owner.__name__}.{name}")
        return Symbol("module") if found else None
    for base in getattr(owner, "__mro__", ()):
        members = vars(base)
        if name in members.get("__annotations__", ()):
            return Symbol("attribute")
        for method in ("__init__", "__post_init__"):
            # The names that the method's code mentions, among them the attributes that it assigns.
            code = getattr(inspect.unwrap(members.get(method, object)), "__code__", None)
            if code is not None and name in code.co_names:
                return Symbol("attribute")
    return None


def _parameters(function: Any) -> str:
    """The parameters of a callable in the notation of `Symbol`."""
    notation: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(p[0] == "*" for p in notation):
            notation.append("*")
        if parameter.kind is parameter.VAR_POSITIONAL:
            name = f"*{name}"
        elif parameter.kind is parameter.VAR_KEYWORD:
            name = f"**{name}"
        notation.append(name if parameter.default is parameter.empty else f"{name}=")
    return ", ".join(name for name in notation if name != "self")
