"""The link's process, a receiver and a bridge in one event loop; and its keeper in the server's process."""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from tlt_client import AsyncClient, TltClientError

from tlt_server.config import Trainer
from tlt_server.errors import ConfigError, TltError
from tlt_server.link.bridge import Bridge, greeting
from tlt_server.wire.messages import READS_TO_SERVER, ModelIdentity
from tlt_server.wire.server import Receiver, lock_folder
from tlt_server.wire.sockets import CurveKeys, Link, Outlet

log = logging.getLogger(__name__)

HEALTH_EVERY, LOOK_EVERY = 0.5, 0.1
"""Seconds, until it is asked again whether the server serves; until either process sees that the other ends."""
FIRST_PAUSE, LONGEST_PAUSE, STEADY, END_WITHIN = 1.0, 30.0, 60.0, 10.0
"""Seconds: before a process that died is started anew, doubled each time up to a most; of life, after which the pause
is the first one again; for an orderly end."""
MEMORY = Path("/dev/shm")
DRAFTERS_KEPT = 3
"""At most one whole and one arriving; a third for who else uses the memory."""
UNKNOWN_BYTES = 2 << 30
"""Of a drafter that is not in a folder here."""


class LinkSettings(NamedTuple):
    """url, api_key, admin_key: of the server. address: of the trainer. name: of the server. model: what its drafters
    must fit. folder: where drafters arrive, this server's alone. most: bytes that one may have. start: folder of the
    drafter that the server was started with."""

    url: str
    api_key: str | None
    admin_key: str | None
    address: str
    name: str
    curve: CurveKeys | None
    model: ModelIdentity
    folder: Path
    most: int | None = None
    start: Path | None = None


def settle(
    trainer: Trainer, url: str, api_key: str | None, admin_key: str | None, model: ModelIdentity, drafter: Path
) -> LinkSettings:
    """The link's settings, once it is sure that a link can be made of them.

    url: where the server will answer.
    drafter: the one that the server starts with; those to come are as large.

    Raises ConfigError: the address, a key or the folder cannot be used.
    """
    name = trainer.name_of(urlsplit(url).port or 0)
    curve = CurveKeys(Path(trainer.key), Path(trainer.trainer_key)) if trainer.key and trainer.trainer_key else None
    folder = Path(trainer.folder) if trainer.folder else _folder_for(urlsplit(url).netloc, drafter)
    Link(trainer.address, READS_TO_SERVER, name, curve).close()
    Outlet(trainer.features_address, curve).close()
    os.close(lock_folder(folder))
    with contextlib.suppress(OSError):  # what was left there is for the receiver
        folder.rmdir()
    return LinkSettings(
        url, api_key, admin_key, trainer.address, name, curve, model, folder, _most_bytes(drafter), drafter
    )


def _most_bytes(drafter: Path) -> int:
    """Of a drafter of the same names and shapes, in whatever dtype."""
    from tlt_server.drafter import header  # imports torch, of which the link's process has no need

    try:
        found = sum(header.nbytes(path) for path in drafter.glob("*.safetensors"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"drafter {drafter}: damaged or incomplete ({error}). Copy or download it again") from error
    return found + header.MOST_HEADER if found else UNKNOWN_BYTES


def _folder_for(place: str, drafter: Path) -> Path:
    """Memory, where drafters fit. Named by where the server answers, so that the next one there clears away what one
    that was killed together with its link has left."""
    size = sum(file.stat().st_size for file in drafter.glob("*.safetensors")) or UNKNOWN_BYTES
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > DRAFTERS_KEPT * size
    folder = (MEMORY if fits else Path(tempfile.gettempdir())) / f"tlt-drafters-{os.getuid()}-{place}"
    if folder.exists() and folder.lstat().st_uid != os.getuid():
        raise ConfigError(f"drafter folder {folder} is another user's: name one, in [trainer] of a --tlt-config file")
    return folder


# -- in the server's process ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def kept(main: Callable[..., None], *arguments: Any, first_pause: float = FIRST_PAUSE) -> Iterator[None]:
    """Meanwhile `main(pipe, *arguments)` runs in a process, started anew when it dies. By the pipe's end each side sees
    the other's death; what this side sends is the word to end."""
    over, first = threading.Event(), _started(main, arguments)
    asked = (over, first, first_pause, main, arguments)
    thread = threading.Thread(target=_keep, args=asked, name="link-keeper", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _started(main: Callable[..., None], arguments: tuple[Any, ...]) -> tuple[Connection, BaseProcess]:
    """Its pipe, and the process that starts it. The first time before the server forks its schedulers: with the other
    end of the pipe in one of them, the link's death would not be seen."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    starter = spawn.Process(target=main, args=(theirs, *arguments))
    starter.start()
    theirs.close()
    return ours, starter


def _keep(
    over: threading.Event,
    link: tuple[Connection, BaseProcess],
    first_pause: float,
    main: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    pause = first_pause
    while True:
        began, (ours, starter) = time.monotonic(), link
        with ours:
            starter.join()
            while not ours.poll(LOOK_EVERY):
                if over.is_set():
                    _end(ours)
                    return
        lived = time.monotonic() - began
        pause = first_pause if lived > STEADY else pause
        log.warning("the link to the drafter trainer died after %.0f s; it is started anew in %.0f s", lived, pause)
        if over.wait(pause):
            return
        pause = min(2 * pause, LONGEST_PAUSE)
        link = _started(main, arguments)


def _end(link: Connection) -> None:
    with contextlib.suppress(ConnectionError):
        link.send_bytes(b"")  # closed, it may still be open in a server's processes, which are forks of this one
    if not link.poll(END_WITHIN):
        log.warning("the link to the trainer has not ended after %.0f s; it will when it can", END_WITHIN)


# -- in the link's own ------------------------------------------------------------------------------------------------


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
        asyncio.run(_follow_until_told(server, settings))
    except* (TltError, TltClientError) as failed:
        log.error("the link ends: %s", failed.exceptions[0])
    finally:
        with contextlib.suppress(OSError):  # it never was, or a folder of the user's holds other files
            settings.folder.rmdir()


async def _follow_until_told(server: Connection, settings: LinkSettings) -> None:
    working = asyncio.create_task(follow(settings))
    while not (working.done() or server.poll()):
        await asyncio.sleep(LOOK_EVERY)
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def follow(settings: LinkSettings) -> None:
    """Waits for the server, then follows the trainer for it.

    Raises ConfigError: the address, the keys or the folder cannot be used any more.
    Raises TltClientError: the server refuses what the link asks.
    """
    transport = httpx.AsyncHTTPTransport(verify=False)  # it speaks to its own server, whoever signed its certificate
    url, api_key, admin_key, address, name, curve, model, folder, most, start = settings
    async with AsyncClient(url, api_key=api_key, admin_key=admin_key, transport=transport) as client:
        while not await client.health():
            await asyncio.sleep(HEALTH_EVERY)
        hello, past, live = await greeting(client, name, model)
        log.info("%s follows the trainer at %s; drafters arrive in %s", name, address, folder)
        receiver = Receiver(Link(address, READS_TO_SERVER, name, curve), hello, folder, most=most)
        try:
            await Bridge(client, receiver, folder, past, live, start).run()
        finally:
            receiver.close()
