"""What a server still holds of requests that have ended, told by itself.

`--worker-extension-cls kept.Engine --middleware kept.Api`, with this folder on PYTHONPATH: the
first looks about in the process of the engine core and its worker, the other in that of the API.
"""

import gc
from collections import Counter
from typing import Any

# In the ids of requests; in two parts, so that this module does not hold it.
MARK = ("hostile", "-")


def holders() -> dict[str, int]:
    """Objects that hold a text with MARK in it, such as the id of a request, counted by kind."""
    mark = "".join(MARK)
    # vLLM hides what it starts with from the collector.
    gc.unfreeze()
    gc.collect()
    found: Counter[str] = Counter()
    for holder in gc.get_objects():
        held = gc.get_referents(holder)
        # A dict of texts and numbers alone is not among the objects.
        for inner in [item for item in held if type(item) is dict and not gc.is_tracked(item)]:
            held += [*inner, *inner.values()]
        # Not in a generator, which would hold the mark itself.
        for item in held:
            if type(item) is str and mark in item:
                found[f"{type(holder).__qualname__} {str(holder)[:200]}"] += 1
                break
    return dict(found)


class Engine:
    """A worker's further method."""

    def kept(self) -> dict[str, int]:
        """What the engine holds."""
        return holders()


class Api:
    """A middleware that answers GET /kept.

    Args:
        app: what answers all else.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers, or hands on."""
        from starlette.responses import JSONResponse

        is_ours = scope.get("path") == "/kept"
        await (JSONResponse(holders()) if is_ours else self.app)(scope, receive, send)
