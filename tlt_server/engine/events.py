"""What happened to a server's weights, for whoever asks later: trainers, people, the dashboard."""

import logging
import time
from collections import deque
from collections.abc import Callable

from tlt_client.schemas import Event

logger = logging.getLogger(__name__)

KEPT = 1000
Detail = str | int | float | bool | None


class EventLog:
    """The last `KEPT` events of one scheduler process, oldest first. replica: its number, of data parallelism."""

    told: Callable[[Event], None] | None = None
    """Called with each event."""

    def __init__(self, replica: int = 0) -> None:
        self._replica = replica
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._next = 1

    def add(self, kind: str, **detail: Detail) -> None:
        """Notes an event, in the log file too."""
        event = Event(self._next, time.time(), kind, self._replica, detail)
        self._events.append(event)
        self._next += 1
        if self.told is not None:
            self.told(event)
        logger.info("%s: %s", kind, ", ".join(f"{name} {value}" for name, value in detail.items()))

    def after(self, number: int) -> list[Event]:
        """Those later than the event of this number; 0 for all that are kept."""
        return [event for event in self._events if event.number > number]
