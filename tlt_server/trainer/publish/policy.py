"""When a drafter is published."""

from typing import Annotated

import msgspec
from msgspec import Meta


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At once where that helps after a publication of the target, else by a margin, or after so many steps.

    margin: share by which the expected accept length must grow; smaller differences are noise, or not worth a swap.
    every: training steps since the last publication of the drafter after which any gain is enough.
    floor: expected accept length that a drafter must reach at all; one below makes no rollout faster, and a server's
        watchdog would switch speculation off again.
    """

    margin: Annotated[float, Meta(ge=0)] = 0.01
    every: Annotated[int, Meta(ge=1)] = 1000
    floor: Annotated[float, Meta(ge=1)] = 1.2

    def reason(self, candidate: float, live: float, *, target_moved: bool, steps: int) -> str | None:
        """Why to publish now, or None to go on training. A drafter that is not better is never published.

        Args:
            candidate: expected accept length of the drafter in training.
            live: of the one in force, on the same features; 1 where there is none.
            target_moved: the target was published since a drafter last was.
            steps: of training since a drafter was last published.
        """
        if not candidate > live or candidate < self.floor:  # so that one that diverged, which is NaN, stays here
            return None
        gain = f"accept length {live:.3f} -> {candidate:.3f}"
        if candidate >= live * (1 + self.margin):
            return gain
        if target_moved:
            return f"{gain}, the target moved"
        return f"{gain} after {steps} steps" if steps >= self.every else None
