"""References that a server's processes still have to finished requests.

Used as `--worker-extension-cls kept.Engine --middleware kept.Api` with this folder on PYTHONPATH:
the first inspects the engine core and its worker, the second the API server.
"""

import gc
from collections import Counter
from typing import Any

# Part of request ids; split, so that this module does not contain it.
MARK = ("hostile", "-")


def holders() -> dict[str, int]:
    """Counts the objects that refer to a string with MARK, such as a request's id, by kind."""
    mark = "".join(MARK)
    # vLLM freezes the objects of its start.
    gc.unfreeze()
    gc.collect()
    counts: Counter[str] = Counter()
    for holder in gc.get_objects():
        referents = gc.get_referents(holder)
        # A dict of only strings and numbers is not tracked.
        for inner in [item for item in referents if type(item) is dict and not gc.is_tracked(item)]:
            referents += [*inner, *inner.values()]
        # Not in a generator, which would refer to the mark.
        for item in referents:
            if type(item) is str and mark in item:
                counts[f"{type(holder).__qualname__} {str(holder)[:200]}"] += 1
                break
    return dict(counts)


class Engine:
    def kept(self) -> dict[str, int]:
        """Returns the references in the engine core's process."""
        return holders()


class Api:
    """A middleware that answers GET /kept."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import JSONResponse

        is_ours = scope.get("path") == "/kept"
        await (JSONResponse(holders()) if is_ours else self.app)(scope, receive, send)
