"""How often the server is asked for what drafters share with its target."""

import asyncio
from pathlib import Path

from tlt_client.schemas import SharedTarget

from tlt_server.link.sharing import REST, Sharing
from tlt_server.wire.messages import Notice

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
        sharing = Sharing(server, tmp_path, told.append)  # type: ignore[arg-type]
        running = asyncio.create_task(sharing.run())
        sharing.trainer(True)
        for version in range(1, 101):
            server.version = version
            sharing.published()
            await asyncio.sleep(5 * every / 100)
        await asyncio.sleep(2 * every)
        running.cancel()

    asyncio.run(publishing())
    assert 1 < server.asked <= 9
    assert told[-1].target_version == 100  # type: ignore[union-attr]
