"""`mars_speculate: false`: a request that is answered without drafts, one token per step.

The target reads one row for it per step, and nothing is verified. The drafter works for it all the
same, since it drafts for a whole batch; its drafts are dropped before the next step is scheduled.
"""

from typing import Any

from vllm_mars.config import MarsConfig
from vllm_mars.requests import options_of


def drop_drafts(scheduler: Any, config: MarsConfig) -> None:
    """Makes a scheduler drop the drafts of the requests that want none.

    Args:
        scheduler: vLLM's `Scheduler`, or a subclass of it. Its `add_request` and `schedule` are
            wrapped, on this instance alone.
        config: the server's options.
    """
    add_request, schedule = scheduler.add_request, scheduler.schedule
    undrafted: set[str] = set()

    def add_and_note(request: Any, *args: Any, **kwargs: Any) -> Any:
        result = add_request(request, *args, **kwargs)
        params = request.sampling_params
        # A further input of a request that is there already comes under its id.
        if params is not None:
            note = undrafted.discard if options_of(params, config).speculates else undrafted.add
            note(request.request_id)
        return result

    def drop_and_schedule(*args: Any, **kwargs: Any) -> Any:
        for request_id in list(undrafted):
            if (request := scheduler.requests.get(request_id)) is None:
                undrafted.discard(request_id)
            else:
                # With asynchronous scheduling these stand for drafts that are still being made.
                request.spec_token_ids = []
        return schedule(*args, **kwargs)

    scheduler.add_request = add_and_note
    scheduler.schedule = drop_and_schedule
