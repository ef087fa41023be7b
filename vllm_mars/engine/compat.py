"""All knowledge of vLLM releases: which are supported, and whether one fits.

`vllm_mars.engine.interfaces` is the one list of what this project touches in vLLM.
`check_interfaces` holds the installed vLLM against it before anything is replaced. Nothing here
runs while tokens are generated, and nothing of vLLM is imported until a check is asked for.
"""

import importlib
import importlib.util
import inspect
import re
from typing import Any

from vllm_mars.engine.interfaces import INTERFACES, Use

# The oldest and the newest.
SUPPORTED = ((0, 32), (0, 33))
# The releases that the tests run on.
RUN = ((0, 32), (0, 33))

_RELEASES = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
_MISSING = object()


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
        f"{module}.{use.name} {found}"
        for module, uses in INTERFACES[group].items()
        for use in uses
        if (found := difference(module, use))
    ]
    if differences:
        import vllm

        raise RuntimeError(
            f"vLLM {vllm.__version__} has other interfaces than vllm-mars needs ({group}): "
            f"{'; '.join(differences)}. Install a vLLM that it knows "
            f"({_RELEASES}), look for a newer vllm-mars, or drop rejection_sample_method 'mars'."
        )


def difference(module: str, use: Use) -> str | None:
    """Says in words what is wrong with a symbol of the installed vLLM, or None if nothing is.

    Args:
        module: the symbol's module; imported if it is not yet.
        use: what it is used for.
    """
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return "is missing"
    for part in use.name.split("."):
        owner, found = found, getattr(found, part, _MISSING)
        if found is _MISSING:
            return None if use.how == "read" and _has_undefined(owner, part) else "is missing"
    if use.how == "read":
        return None
    if not callable(found):
        return f"is an attribute, but a function of ({use.parameters}) is expected"
    return unlike(use, _parameters(found))


def unlike(use: Use, parameters: str) -> str | None:
    """Says in words how a function's parameters differ from those that a use needs, or None.

    Args:
        use: the use.
        parameters: names without self in the notation of a signature; "=" marks a default, "*" the
            beginning of the keyword-only ones.
    """
    present = _split(parameters)
    names = [name.rstrip("=") for name in present]
    positional, _, keyword = use.parameters.partition("*")
    first, named = _split(positional), set(_split(keyword))
    fits = names == first if use.how == "override" else names[: len(first)] == first
    if use.how == "call":
        required = {name for name in present[len(first) :] if name[0] != "*" and name[-1] != "="}
        fits = fits and required <= named <= set(names[len(first) :])
    if fits:
        return None
    verb = {"override": "overridden", "call": "passed", "wrap": "read"}[use.how]
    return f"has parameters ({parameters}), but ({use.parameters}) are {verb}"


def _split(names: str) -> list[str]:
    return [name for name in (part.strip() for part in names.split(",")) if name]


def _has_undefined(owner: Any, name: str) -> bool:
    """Whether a name is an instance's alone, or a module that its package has not imported."""
    if inspect.ismodule(owner):
        is_package = hasattr(owner, "__path__")
        return is_package and importlib.util.find_spec(f"{owner.__name__}.{name}") is not None
    for base in getattr(owner, "__mro__", ()):
        members = vars(base)
        if name in members.get("__annotations__", ()):
            return True
        for method in ("__init__", "__post_init__"):
            # The names that the method's code mentions, among them the attributes that it assigns.
            code = getattr(inspect.unwrap(members.get(method, object)), "__code__", None)
            if code is not None and name in code.co_names:
                return True
    return False


def _parameters(function: Any) -> str:
    """The parameters of a callable, as `unlike` takes them."""
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
