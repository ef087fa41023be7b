"""Which drafts the scheduler drops: those of requests that want none, and no others."""

from types import SimpleNamespace

from vllm_mars import MarsConfig
from vllm_mars.engine.undrafted import drop_drafts


class Scheduler:
    """What the drop touches; a further input of a request that is there goes to that request."""

    def __init__(self):
        self.requests = {}
        drop_drafts(self, MarsConfig())

    def add_request(self, request):
        self.requests.setdefault(request.request_id, request)

    def schedule(self):
        return {name: request.spec_token_ids for name, request in self.requests.items()}

    def step(self):
        for request in self.requests.values():
            request.spec_token_ids = [1, 2]
        return self.schedule()


def request(name, **own):
    params = SimpleNamespace(extra_args=own, structured_outputs=None)
    return SimpleNamespace(request_id=name, sampling_params=params, spec_token_ids=[])


def test_drafts_are_dropped_of_those_that_want_none():
    scheduler = Scheduler()
    scheduler.add_request(request("drafted"))
    scheduler.add_request(request("alone", mars_speculate=False))
    for _ in range(2):
        assert scheduler.step() == {"drafted": [1, 2], "alone": []}
    # Another request of this id.
    del scheduler.requests["alone"]
    scheduler.add_request(request("alone"))
    assert scheduler.step() == {"drafted": [1, 2], "alone": [1, 2]}


def test_a_further_input_changes_nothing():
    scheduler = Scheduler()
    for _ in range(2):
        scheduler.add_request(request("session", mars_speculate=False))
        assert scheduler.step() == {"session": []}
