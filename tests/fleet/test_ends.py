"""What is cut off in a front ends, in whatever moment it is: else closing would wait for it for ever."""

import asyncio

import pytest

from tlt_server.fleet.links import Links
from tlt_server.fleet.members import Fleet
from tlt_server.fleet.registered import Registered
from tlt_server.process import free_port

MOMENTS = range(12)
"""Turns of the event loop: more than either takes."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_asking_whether_anything_listens_ends(moment: int) -> None:
    async def run() -> None:
        links = Links(None)
        asking = asyncio.create_task(links.listens(f"http://127.0.0.1:{free_port()}"))
        for _ in range(moment):
            await asyncio.sleep(0)
        cut_off = asking.cancel()
        await asyncio.wait({asking}, timeout=5)
        assert asking.cancelled() or not cut_off
        await links.close()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_telling_a_router_ends(moment: int) -> None:
    async def run() -> None:
        links = Links(None)
        registered = Registered(f"http://127.0.0.1:{free_port()}", None, Fleet(1), links, 60.0)
        await asyncio.sleep(0.1)
        registered.turned()
        for _ in range(moment):
            await asyncio.sleep(0)
        await asyncio.wait_for(registered.close(), 5)
        await links.close()

    asyncio.run(run())
