"""Check that the packages of an optional part are installed."""

import importlib.util
from collections.abc import Iterable

INSTALL_VLLM = (
    "run pip install '.[cuda]' in the checkout of vllm-mars, or where there is no GPU "
    "`make install`, which makes an environment in .venv."
)


def require(part: str, extra: str, modules: Iterable[str]) -> None:
    """Raises RuntimeError if top-level modules are missing, and names the extra to install."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"{part} needs {', '.join(missing)}; run pip install '.[{extra}]' in the checkout of "
            "vllm-mars."
        )
