"""What the servers have said on the control link: who is there, which target and which drafter they serve."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tlt_server.trainer.targets import Targets
from tlt_server.wire.messages import DrafterRefused, DrafterSwapped, Hello, Message, TargetPublished, TargetShared
from tlt_server.wire.sender import SILENCE

log = logging.getLogger(__name__)


@dataclass
class _Server:
    """count: of its target. drafter: the version in force."""

    heard: float
    count: int
    drafter: int


class Servers:
    """All that is known of the servers, for one thread.

    Attributes:
        targets: theirs, under numbers of our own.
        newest_drafter: the highest version that any was ever given.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._servers: dict[str, _Server] = {}
        self._shared: dict[int, Path] = {}
        self.targets = Targets()
        self.newest_drafter = 0

    @property
    def names(self) -> list[str]:
        """Of those that were heard of late."""
        now = self._clock()
        return sorted(name for name, server in self._servers.items() if now - server.heard < SILENCE)

    @property
    def drafter(self) -> int:
        """The newest version in force; 0 where all have the one that they were started with."""
        return max((server.drafter for server in self._servers.values()), default=0)

    def shared(self, target: int) -> Path | None:
        """Where embedding and head of a target lie, by our number of it."""
        return self._shared.get(target)

    def forget(self, target: int) -> None:
        """What was shared of it cannot be used."""
        self._shared.pop(target, None)

    def hear(self, peer: str, message: Message) -> None:
        """peer: `NAME/TOKEN`, as `Sender` names it."""
        name = peer.rpartition("/")[0]
        if isinstance(message, Hello):
            self._greet(name, message)
        elif (server := self._servers.get(name)) is not None:
            self._note(name, server, message)

    def _greet(self, name: str, hello: Hello) -> None:
        if name not in self._servers:
            log.info("%s serves target %d with drafter %d", name, hello.target_version, hello.drafter_version)
        self._servers[name] = _Server(self._clock(), hello.target_version, hello.drafter_version)
        self.newest_drafter = max(self.newest_drafter, hello.newest_drafter)
        target = self.targets.hear(name, hello.target_version, hello.weight_version)
        if hello.shared:
            self._share(target, hello.shared)

    def _note(self, name: str, server: _Server, message: Message) -> None:
        match message:
            case TargetPublished(target_version=count, weight_version=weight_version):
                if count > server.count:  # else it waited, and the hello before it has said so
                    server.count = count
                    self.targets.hear(name, count, weight_version)
            case TargetShared(target_version=count, path=path):
                if (target := self.targets.of(name, count)) is not None:
                    self._share(target, path)
            case DrafterSwapped(version=version, outcome=outcome, drafter_version=in_force, reason=reason):
                server.drafter = in_force
                log.info("%s: drafter %d is %s; %d in force. %s", name, version, outcome, in_force, reason)
            case DrafterRefused(version=version, reason=reason):
                log.warning("%s refuses drafter %d: %s", name, version, reason)

    def _share(self, target: int, path: str) -> None:
        if target == self.targets.newest:
            self._shared = {target: Path(path)}
