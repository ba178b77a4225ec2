"""What drafters share with the target, kept where the trainer can read it: in the link's folder, of one version."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from tlt_client import AsyncClient, TltClientError

from tlt_server.wire.messages import Notice, TargetShared

log = logging.getLogger(__name__)

PATTERN = "target-*"

REST = 4.0
"""Times as long as sharing took, until it may begin again, so that it takes a fifth of the time at most; more, and the
trainer would wait for it longer. What was published meanwhile is skipped, but for the last."""


class Sharing:
    """Has the server write it after each publication, while there is a trainer to read it.

    client: of the server.
    folder: where the server may write.
    tell: the trainer.
    """

    def __init__(self, client: AsyncClient, folder: Path, tell: Callable[[Notice], None]) -> None:
        self._client, self._folder, self._tell = client, folder, tell
        self._numbers = count(1)
        self._is_wanted = self._is_current = False
        self._changed = asyncio.Event()

    def trainer(self, connected: bool) -> None:
        self._is_wanted = connected
        self._changed.set()

    def published(self) -> None:
        """The target is another one."""
        self._is_current = False
        self._changed.set()

    async def run(self) -> None:
        """Until it is cancelled; leaves nothing behind."""
        self._clear()  # an earlier life's
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._is_wanted and not self._is_current:
                    self._is_current = True
                    began = time.monotonic()
                    await self._share()
                    await asyncio.sleep(REST * (time.monotonic() - began))
        finally:
            self._clear()

    async def _share(self) -> None:
        try:
            shared = await self._client.share_target(str(self._folder / f"target-{next(self._numbers)}"))
        except TltClientError as error:
            self._clear()
            log.warning("the trainer gets no embedding and head of this target: %s", error)
            return
        self._tell(TargetShared(target_version=shared.target_version, path=shared.path))

    def _clear(self) -> None:
        for path in self._folder.glob(PATTERN):
            shutil.rmtree(path)
