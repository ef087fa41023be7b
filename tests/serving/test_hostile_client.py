"""No client can crash a server, cause an error or a leak in it. `make soak` runs for longer."""

import asyncio
import json
import time

import pytest

from engines import MARS, open_server
from hostile import Client

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("bounded_server")]

SECONDS = 25


def harass(server, seed):
    client = Client(server, seed)

    async def run():
        await client.begin()
        await client.run(time.monotonic() + SECONDS)
        await client.look_for_leaks()

    try:
        asyncio.run(run())
    finally:
        print(client.counts())
    assert {answer for _, answer in client.answered} >= {200, 400, 500, "left"}


def test_the_recommended_server(bounded_server):
    harass(bounded_server, seed=0)


@pytest.mark.nightly
def test_a_server_that_is_lossy_on_request(bytes_model, tmp_path):
    opt_in = {"mars_max_loss": 0, "mars_limit": 0.02, "mars_strict_opening": 0}
    # Single bytes, so that many answers have a thinking section.
    thinking = json.dumps({"reasoning_start_str": "a", "reasoning_end_str": "b"})
    arguments = ("--reasoning-config", thinking)
    with open_server(bytes_model, MARS | opt_in, tmp_path, *arguments) as server:
        harass(server, seed=1)
