"""`tlt-server top`: a server, or a fleet, in a terminal."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text
from tlt_client.schemas import Fleet, Status

from tlt_server.errors import ServerFailed
from tlt_server.watch.frames import of_fleet, of_server, plain
from tlt_server.watch.rates import Rates
from tlt_server.watch.reads import Reads

HISTORY = 60
AT_ONCE = 16


class Watched:
    """What was read before, that rates are taken from."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._before: dict[str, Status | None] = {}
        self._history: deque[Rates] = deque(maxlen=HISTORY)

    def frame(self) -> RenderableType:
        """Reads, and says what there is. Raises ServerFailed."""
        fleet = self._reads.fleet()
        return self._server() if fleet is None else self._fleet(fleet)

    def lost(self) -> None:
        """Of the time until the server answers again nobody knows a rate."""
        self._before = {}

    def _server(self) -> RenderableType:
        seen = self._reads.server()
        rates = Rates.between(self._before.get(""), seen.status)
        if self._before:
            self._history.append(rates)
        self._before = {"": seen.status}
        return of_server(seen, rates, self._history)

    def _fleet(self, fleet: Fleet) -> RenderableType:
        names = [replica.name for replica in fleet.replicas]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            statuses = dict(zip(names, pool.map(self._reads.status, names), strict=True))
        rates = {
            name: Rates() if status is None else Rates.between(self._before.get(name), status)
            for name, status in statuses.items()
        }
        self._before = statuses
        return of_fleet(fleet, statuses, rates)


def once(url: str, key: str | None, console: Console, interval_s: float) -> None:
    """Prints one frame, of two reads. Raises ServerFailed: there is no answer."""
    with contextlib.closing(Reads(url, key)) as reads:
        watched = Watched(reads)
        watched.frame()
        time.sleep(interval_s)
        console.print(watched.frame())


def top(url: str, key: str | None, console: Console, interval_s: float) -> None:
    """Until q or Ctrl-C. A server that is gone is told, and asked again. Without a terminal, frame after frame."""
    with contextlib.closing(Reads(url, key)) as reads, _keys() as pressed:
        watched = Watched(reads)
        live = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else None
        with live or contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt):
            while True:
                shown = _told(url, watched)
                if live:
                    live.update(shown, refresh=True)
                else:
                    console.print(shown)
                if "q" in pressed(interval_s):
                    break


def _told(url: str, watched: Watched) -> RenderableType:
    head = Text.assemble((plain(url), "bold"), "   ", time.strftime("%H:%M:%S"), ("   q ends", "dim"))
    try:
        return Group(head, Text(), watched.frame())
    except ServerFailed as error:
        watched.lost()
        return Group(head, Text(), Text(f"{plain(error)}; trying again", style="red"))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys as they are pressed, where there is a keyboard."""
    if not sys.stdin.isatty():
        yield _asleep
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _asleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _pressed(seconds: float) -> str:
    """What was pressed within this time, at once; empty: nothing."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1024).decode(errors="replace") if ready else ""
