"""The link's process: a receiver in a thread, a bridge in an event loop, until the server's process ends it."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import httpx
from tlt_client import AsyncClient, TltClientError

from tlt_server.errors import TltError
from tlt_server.link.bridge import Bridge, greeting
from tlt_server.link.settings import LinkSettings
from tlt_server.wire.receiver import receive

log = logging.getLogger(__name__)

HEALTH_EVERY = 0.5
"""Seconds, until the server serves."""


def run(server: Connection, settings: LinkSettings) -> None:
    """The main function of the link's process. It ends at once, and a child of it goes on as the link.

    The child is nobody's: where SGLang ends a server by a signal, or because a scheduler has died, it kills all of its
    descendants, and who is killed leaves its files behind, in memory. In a session of its own it hears no Ctrl-C
    either. It ends, and clears up, when `server` has something to read: a word to end, or the end of that process.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    logging.basicConfig(level=logging.WARNING, format="[%(asctime)s link] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    logging.getLogger("tlt_server").setLevel(logging.INFO)
    try:
        asyncio.run(_until_told(server, follow(settings)))
    except* (TltError, TltClientError) as failed:
        log.error("the link ends: %s", "; ".join(_reasons(failed)))
    finally:
        with contextlib.suppress(OSError):  # it never was, or a folder of the user's holds other files
            settings.folder.rmdir()


def _reasons(failed: BaseExceptionGroup[BaseException]) -> Iterator[str]:
    for error in failed.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _reasons(error)
        else:
            yield str(error)


async def follow(settings: LinkSettings) -> None:
    """Waits for the server, then follows the trainer for it.

    Raises:
        ConfigError: the address, the keys or the folder cannot be used any more.
        TltClientError: the server refuses what the link asks.
    """
    transport = httpx.AsyncHTTPTransport(verify=False)  # it speaks to its own server, whoever signed its certificate
    async with AsyncClient(
        settings.url, api_key=settings.api_key, admin_key=settings.admin_key, transport=transport
    ) as client:
        while not await client.health():
            await asyncio.sleep(HEALTH_EVERY)
        greeted = await greeting(client, settings.name, settings.model)
        log.info(
            "%s follows the trainer at %s; drafters arrive in %s", settings.name, settings.address, settings.folder
        )
        ours, theirs = Pipe()
        receiving = asyncio.to_thread(
            receive,
            settings.address,
            theirs,
            greeted.hello,
            settings.folder,
            curve=settings.curve,
            most=settings.most,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(receiving)
                tasks.create_task(Bridge(client, ours, greeted, settings.address, settings.folder).run())
        finally:
            ours.close()  # which ends the receiver


async def _until_told(server: Connection, work: Coroutine[Any, Any, None]) -> None:
    """Runs the work until it ends by an error, or there is something to read."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(server.fileno(), told.set)
    working, waiting = asyncio.create_task(work), asyncio.create_task(told.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
