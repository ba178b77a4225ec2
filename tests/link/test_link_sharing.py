"""How often the server is asked for what drafters share with its target."""

import asyncio
from pathlib import Path

from tlt_client import Event
from tlt_client.schemas import SharedTarget

from tests.wire.ends import HELLO
from tlt_server.link.bridge import REST, Bridge, Greeting
from tlt_server.wire.messages import Notice, TargetShared
from tlt_server.wire.server import TrainerLink

TAKES_S = 0.02


class SlowServer:
    """version: of its target."""

    def __init__(self) -> None:
        self.version = self.asked = 0

    async def share_target(self, path: str) -> SharedTarget:
        self.asked += 1
        version = self.version
        await asyncio.sleep(TAKES_S)
        return SharedTarget(version, path)


def test_sharing_takes_a_fifth_of_the_time_and_ends_with_the_newest(tmp_path: Path) -> None:
    server, told = SlowServer(), list[Notice]()
    every = (1 + REST) * TAKES_S

    async def publishing() -> None:
        bridge = Bridge(server, told.append, Greeting(HELLO), "ipc://t", tmp_path)  # type: ignore[arg-type]
        running = asyncio.create_task(bridge._share())
        bridge.hear(TrainerLink(connected=True, rejected=0))
        for version in range(1, 101):
            server.version = version
            published = {"version": version, "weight_version": "step"}
            bridge._pass_on(Event(version, 0.0, "target_published", 0, published), published)
            await asyncio.sleep(5 * every / 100)
        await asyncio.sleep(2 * every)
        running.cancel()

    asyncio.run(publishing())
    assert 1 < server.asked <= 9
    shared = [notice.target_version for notice in told if isinstance(notice, TargetShared)]
    assert shared[-1] == 100
