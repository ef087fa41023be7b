"""Whether the packages of an optional part are installed."""

import importlib.util
from collections.abc import Iterable


def require(what: str, extra: str, modules: Iterable[str]) -> None:
    """Checks that modules can be found, without importing them.

    Args:
        what: what needs them, in words.
        extra: the extra of this package that brings them.
        modules: names of top-level modules.

    Raises:
        RuntimeError: some are missing; the message names them and the extra.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"{what} needs {', '.join(missing)}; pip install 'vllm-mars[{extra}]'.")
