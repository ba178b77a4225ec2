"""How often the server is asked for what drafters share with its target."""

import asyncio
import time
from pathlib import Path

import pytest
from tlt_client import DrafterTrainer, Event, Load
from tlt_client.schemas import SharedTarget

from tests.link.test_bridge import Receiver
from tlt_server.link.bridge import REST, Bridge

TAKES_S = 0.02


class SlowServer:
    """version: of its target. takes_s: to share it."""

    def __init__(self, takes_s: float = TAKES_S) -> None:
        self.version = self.asked = 0
        self._takes_s = takes_s

    async def share_target(self, path: str) -> SharedTarget:
        self.asked += 1
        version = self.version
        await asyncio.sleep(self._takes_s)
        return SharedTarget(version, path)

    async def load(self) -> Load:
        return Load(running=0, waiting=0)


@pytest.mark.slow
def test_sharing_takes_a_fifth_of_the_time_and_ends_with_the_newest(tmp_path: Path) -> None:
    server, receiver = SlowServer(), Receiver()
    every = (1 + REST) * TAKES_S

    async def publishing() -> None:
        bridge = Bridge(server, receiver, tmp_path)  # type: ignore[arg-type]
        running = asyncio.create_task(bridge._share())
        bridge.hear(DrafterTrainer(address="ipc://t", connected=True))
        for version in range(1, 101):
            server.version = version
            published = {"version": version, "weight_version": "step"}
            bridge._note(Event(version, 0.0, "target_published", 0, published))
            await asyncio.sleep(5 * every / 100)
        async with asyncio.timeout(10):
            while not receiver.hello.shared:  # of the newest: each publication takes back what was shared before
                await asyncio.sleep(TAKES_S)
        running.cancel()

    asyncio.run(publishing())
    assert 1 < server.asked <= 9
    assert receiver.hello.target_version == 100


@pytest.mark.slow
def test_a_server_without_requests_shares_each_target_at_once(tmp_path: Path) -> None:
    """In a step of RL the trainer waits for it, while the policy learns: it waited for five times as long."""
    server, receiver = SlowServer(takes_s := 0.3), Receiver()

    async def published() -> float:
        bridge = Bridge(server, receiver, tmp_path)  # type: ignore[arg-type]
        running = asyncio.create_task(bridge._share())
        bridge.hear(DrafterTrainer(address="ipc://t", connected=True))
        await bridge._weigh()
        began = time.monotonic()
        for version in range(1, 4):
            server.version = version
            told = {"version": version, "weight_version": "step"}
            bridge._note(Event(version, 0.0, "target_published", 0, told))
            while not receiver.hello.shared:
                await asyncio.sleep(0.01)
        running.cancel()
        return time.monotonic() - began

    assert asyncio.run(published()) < 3 * takes_s + REST * takes_s
    assert server.asked == 3
