"""What the servers have said on the control link: who is there, which target and which drafter they serve."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from tlt_server.trainer.data.targets import Targets
from tlt_server.wire.messages import Hello
from tlt_server.wire.sharing import Source
from tlt_server.wire.trainer import SILENCE

log = logging.getLogger(__name__)

STAGING_S = 180.0
"""Seconds, longer than a server's link waits for a drafter to be staged: its word of what became of it is lost then."""

HIGHEST_GIVEN = 1 << 52
"""Of a drafter that a server says it was given, and that ours go beyond: below what a message holds, for versions only
grow, and one hello may not use them up."""

SERVERS_KEPT = 1024
UNUSABLE_KEPT = 64
"""Names of servers, and paths of what was shared and could not be used."""


@dataclass
class _Server:
    """peer: its name in this life. drafter: the active version; reason: why the last one that is not is not. settled:
    the newest drafter of which it has said what became. given, given_at: the newest that it has, and since when."""

    peer: str
    heard: float = 0.0
    drafter: int = 0
    reason: str = ""
    settled: int = 0
    given: int = 0
    given_at: float = 0.0

    def has_settled(self, version: int, now: float) -> bool:
        return self.settled >= version or (self.given >= version and now - self.given_at > STAGING_S)


class Servers:
    """All that is known of the servers, for any thread. newest_drafter: the highest version that any was ever given."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._servers: dict[str, _Server] = {}
        self._shared: dict[int, Path] = {}
        self._elsewhere: Source | None = None
        self._unusable: deque[Path] = deque(maxlen=UNUSABLE_KEPT)
        self._given_up: deque[int] = deque(maxlen=UNUSABLE_KEPT)
        self.targets = Targets()
        self.newest_drafter = 0
        self._has_warned = False

    @property
    def names(self) -> list[str]:
        """Of those that were heard of late."""
        with self._lock:
            return sorted(self._present())

    @property
    def drafter(self) -> int:
        """The newest active version; 0 where all have the one that they were started with."""
        with self._lock:
            return max((server.drafter for server in self._servers.values()), default=0)

    def is_on_its_way(self, version: int) -> bool:
        """Whether a drafter that was published is active nowhere yet, nor refused, nor rolled back. The first server to
        say so counts, lest a slow one hold up the others; one that is silent does not."""
        now = self._clock()
        with self._lock:
            return not any(server.has_settled(version, now) for server in self._present().values())

    def shared(self, target: int) -> Path | None:
        """Where embedding and head of a target lie, by our number of it."""
        with self._lock:
            return self._shared.get(target)

    def elsewhere(self, target: int) -> Source | None:
        """Whom to ask for them, where they lie on other machines alone."""
        with self._lock:
            found = self._elsewhere
            return found if found is not None and found.target == target and target not in self._given_up else None

    def take(self, target: int, folder: Path) -> None:
        """They were fetched."""
        with self._lock:
            if target == self.targets.newest:
                self._shared = {target: folder}

    def forget(self, target: int) -> None:
        """What was shared of it cannot be used, nor will it be tried again."""
        with self._lock:
            self._given_up.append(target)
            if (path := self._shared.pop(target, None)) is not None:
                self._unusable.append(path)

    def hear(self, peer: str, hello: Hello) -> None:
        """peer: `NAME/TOKEN`, as `Sender` names it. Returns soon."""
        with self._lock:
            self._hear(peer, hello)

    def _hear(self, peer: str, hello: Hello) -> None:
        name = peer.rpartition("/")[0]
        server = self._servers.pop(name, None)
        if server is None:
            log.info("%s serves target %d with drafter %d", name, hello.target_version, hello.drafter_version)
        if server is None or server.peer != peer:
            server = _Server(peer, drafter=hello.drafter_version, reason=hello.reason)
        self._servers[name] = server  # the last one heard is the last one here
        if len(self._servers) > SERVERS_KEPT:
            del self._servers[next(iter(self._servers))]
        if hello.drafter_version != server.drafter:
            log.info("%s: drafter %d is in force", name, hello.drafter_version)
        if hello.reason not in {"", server.reason}:
            log.warning("%s: %s", name, hello.reason)
        server.heard, server.drafter, server.reason = self._clock(), hello.drafter_version, hello.reason
        server.settled = max(server.settled, hello.drafter_version, hello.settled_drafter)
        if hello.newest_drafter > server.given:
            server.given, server.given_at = hello.newest_drafter, server.heard
        self._note_given(name, hello.newest_drafter)
        target = self.targets.hear(name, hello.target_version, hello.weight_version)
        if not hello.shared or target != self.targets.newest or (path := Path(hello.shared)) in self._unusable:
            return
        if path.is_dir():  # a link of this machine chose a name that there is once
            self._shared = {target: path}
        elif target not in self._shared:
            self._elsewhere = Source(target, peer.encode(), hello.target_version)

    def _present(self) -> dict[str, _Server]:
        now = self._clock()
        return {name: server for name, server in self._servers.items() if now - server.heard < SILENCE}

    def _note_given(self, name: str, version: int) -> None:
        if version <= max(HIGHEST_GIVEN, self.newest_drafter):
            self.newest_drafter = max(self.newest_drafter, version)
        elif not self._has_warned:
            self._has_warned = True
            said = "%s says that it was given drafter %d, which ours cannot go beyond: it gets none. Restart it"
            log.warning(said, name, version)
