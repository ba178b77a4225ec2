"""When requests that have arrived are prefilled, while others decode.

SGLang prefills what has arrived before anything else, and all that decode stand still meanwhile: for a request or two,
in every other step where many short responses are in flight. Where a prefill waits, the next requests join it. So it
waits until those that are held back have lost as much as it will cost: as many steps, summed over them, as there are
requests that it stops for about one step. That is at most twice what one who knew all arrivals would lose, as for
whoever rents skis, and for steady arrivals it is the best period.
"""

from typing import Any


class PrefillDelay:
    """Stands where SGLang has its own `MinFreeSlotsDelayer`, on all ranks alike: it counts steps, not seconds.

    scheduler: whose `waiting_queue` it reads. most: steps that a request is held back at most.
    """

    def __init__(self, scheduler: Any, most: int) -> None:
        self._scheduler, self._most = scheduler, most
        self._steps = self._lost = 0

    def should_delay(self, *, running_bs: int, num_allocatable_reqs: int) -> bool:
        """Before each step for which something waits: whether it is a decode step all the same."""
        held = min(len(self._scheduler.waiting_queue), num_allocatable_reqs)
        self._steps += 1
        self._lost += held
        if held > 0 and self._steps <= self._most and self._lost < running_bs:
            return True
        self._steps = self._lost = 0
        return False


def delay_prefills(scheduler: Any, most: int) -> None:
    """From here on, unless `most` is 0, or SGLang was told to do so in its own way."""
    if most and scheduler.min_free_slots_delayer is None:
        # override: where upstream asks whether a prefill is to wait
        scheduler.min_free_slots_delayer = PrefillDelay(scheduler, most)
