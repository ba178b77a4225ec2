"""A control call's answer is its own, whoever has gone away meanwhile. (patches/0036)"""

import asyncio
from typing import Any

from sglang.srt.managers.communicator import FanOutCommunicator


async def until_sent(sent: list[str], count: int) -> None:
    while len(sent) < count:
        await asyncio.sleep(0)


def test_who_goes_away_leaves_no_answer_to_the_next_one() -> None:
    async def story() -> Any:
        sent: list[str] = []
        communicator: FanOutCommunicator[str] = FanOutCommunicator(sent.append, fan_out=1)
        gone, stays = (asyncio.create_task(communicator(name)) for name in ("gone", "stays"))
        await until_sent(sent, 1)
        gone.cancel()
        for name in ("gone", "stays"):
            await asyncio.sleep(0.01)
            assert sent[-1] == name  # one at a time
            communicator.handle_recv(f"answer to {name}")
        return await stays

    assert asyncio.run(story()) == ["answer to stays"]
