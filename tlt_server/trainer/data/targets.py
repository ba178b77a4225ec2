"""Which target a server speaks of: each counts publications for itself, and from 0 again when it is started anew."""

from threading import Lock

UNNAMED = "default"
"""SGLang's name of weights that nobody has named."""

NONE = -1

KEPT = 4096
"""Targets that are known, and servers: what peers say may not grow without end. Counts of a server are fewer."""
COUNTS_KEPT = 64


class Targets:
    """Numbers of the trainer's own for the targets that its servers serve; a newer target has a higher one.

    Two servers serve the same target where it has the same name or, without a name, where they count the same; after a
    server has begun to count anew, what it counts is its own. For one server numbers only grow. For any thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: dict[tuple[object, ...], int] = {}
        self._counted: dict[str, dict[int, int]] = {}
        self._life: dict[str, int] = {}
        self._counts: dict[int, int] = {}

    @property
    def newest(self) -> int:
        """The highest number; -1 before any server was heard."""
        with self._lock:
            return next(reversed(self._counts), NONE)

    def hear(self, server: str, count: int, name: str) -> int:
        """The number of the target that a server serves now, which counts its publications and names its weights."""
        with self._lock:
            return self._hear(server, count, name)

    def of(self, server: str, count: int) -> int | None:
        """The number of what a server counted; None where it has not told of it."""
        with self._lock:
            return self._counted.get(server, {}).get(count)

    def count_of(self, number: int) -> int:
        """How the server counts it that told of it first; of the last `KEPT`."""
        return self._counts[number]

    def _hear(self, server: str, count: int, name: str) -> int:
        counted = self._counted[server] = self._counted.pop(server, {})
        if len(self._counted) > KEPT:
            gone = next(iter(self._counted))
            del self._counted[gone]
            self._life.pop(gone, None)
        if counted and count < max(counted):
            counted.clear()
            self._life[server] = 1 + max(self._life.values(), default=0)
        if count not in counted:
            counted[count] = self._number(max(counted.values(), default=NONE), server, count, name)
            if len(counted) > COUNTS_KEPT:
                del counted[next(iter(counted))]
        return counted[count]

    def _number(self, before: int, server: str, count: int, name: str) -> int:
        key = (name,) if name != UNNAMED else (self._life.get(server, 0), count)
        if self._known.get(key, NONE) <= before:  # new, or an old name for other weights
            number = next(reversed(self._counts), NONE) + 1
            self._counts[number] = count
            self._known.pop(key, None)
            self._known[key] = number
            if len(self._counts) > KEPT:
                del self._counts[next(iter(self._counts))]
            if len(self._known) > KEPT:
                del self._known[next(iter(self._known))]
        return self._known[key]
