"""Which target a server speaks of: each counts publications for itself, and from 0 again when it is started anew."""

UNNAMED = "default"
"""SGLang's name of weights that nobody has named."""

NONE = -1


class Targets:
    """Numbers of the trainer's own for the targets that its servers serve; a newer target has a higher one.

    Two servers serve the same target where it has the same name or, without a name, where they count the same; after a
    server has begun to count anew, what it counts is its own. For one server numbers only grow.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}
        self._counted: dict[str, dict[int, int]] = {}
        self._life: dict[str, int] = {}
        self._counts: list[int] = []

    @property
    def newest(self) -> int:
        """The highest number; -1 before any server was heard."""
        return len(self._counts) - 1

    def hear(self, server: str, count: int, name: str) -> int:
        """The number of the target that a server serves now.

        Args:
            server: its name.
            count: of publications since it was started.
            name: the RL trainer's, of the target.
        """
        counted = self._counted.setdefault(server, {})
        if counted and count < max(counted):
            counted.clear()
            self._life[server] = 1 + max(self._life.values(), default=0)
        if count not in counted:
            counted[count] = self._number(max(counted.values(), default=NONE), server, count, name)
        return counted[count]

    def of(self, server: str, count: int) -> int | None:
        """The number of what a server counted; None where it has not told of it."""
        return self._counted.get(server, {}).get(count)

    def count_of(self, number: int) -> int:
        """How the server counts it that told of it first."""
        return self._counts[number]

    def _number(self, before: int, server: str, count: int, name: str) -> int:
        key = (name,) if name != UNNAMED else (self._life.get(server, 0), count)
        if self._known.get(key, NONE) <= before:  # new, or an old name for other weights
            self._counts.append(count)
            self._known[key] = self.newest
        return self._known[key]
