"""A watchdog for each arm: what one has accepted says nothing of whether another has as much.

All of them hear what happens to the weights, and each sees the steps of its own arm, held against its own steps of
before. The first to find a drafter worse is believed; a drafter is trusted once one of them has found it as good.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace
from tlt_client.schemas import Watch

from tlt_server.config import Arm, Watchfulness
from tlt_server.engine.weights.watchdog import Finding, Watchdog


class Watchdogs:
    """As `Watchdog`, of which it has one for each arm.

    mode: of them all.
    """

    def __init__(self, arms: Sequence[Arm], mode: Watchfulness, floor: float, clock: Callable[[], float]) -> None:
        self.mode = mode
        self._dogs = {arm: Watchdog(mode, floor, arm.num_steps, clock) for arm in arms}
        self._newest = self._dogs[arms[0]]

    @property
    def trusted(self) -> bool:
        """Whether one of them trusts the drafter in force."""
        return any(dog.trusted for dog in self._dogs.values())

    def swapped(self) -> None:
        """Another drafter is in force."""
        for dog in self._dogs.values():
            dog.swapped()

    def published(self) -> None:
        """The target is another one."""
        for dog in self._dogs.values():
            dog.published()

    def resumed(self) -> None:
        """What was released is in memory again."""
        for dog in self._dogs.values():
            dog.resumed()

    def rolled_back(self, *, trusted: bool) -> None:
        """An older drafter is in force again."""
        for dog in self._dogs.values():
            dog.rolled_back(trusted=trusted)

    def probed(self) -> None:
        """Speculation is tried again."""
        for dog in self._dogs.values():
            dog.probed()

    def stopped(self) -> None:
        """Speculation is off."""
        for dog in self._dogs.values():
            dog.stopped()

    def observe(self, arm: Arm, accepted: Sequence[tuple[str, int]]) -> Finding | None:
        """One step of an arm: accepted drafts, by request. A finding ends the watch in that arm."""
        self._newest = self._dogs[arm]
        return self._newest.observe(accepted)

    def describe(self) -> Watch:
        """What is seen in the arm of the newest step."""
        return replace(self._newest.describe(), mode=self.mode)
