"""Which drafter is in force, which is on its way, and which can come back: on every rank the same.

A drafter is offered, staged by a thread, and put in force when every rank has staged it. Each of these is a message
that all ranks handle between the same two steps, and what they decide follows from messages alone: how far its own
thread is, a rank tells the others when they are about to act, and asks them to act together or not at all.

    versions         only grow: one that is offered must be above all that were ever in force. Only a rollback brings an
                     older one back, under its own number
    a duplicate      of the version in force, or on its way, is that one: offering it again changes nothing
    two at once      the newer overtakes: the older is never put in force, and who offered it is told so
    an older one     is refused, and so is one that was rolled back
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tlt_client.schemas import Drafter as Described
from tlt_client.schemas import DrafterVersion, Staging

from tlt_server.engine.events import EventLog
from tlt_server.engine.messages import Offer
from tlt_server.engine.ranks import lowest, objections
from tlt_server.engine.swap import Staged
from tlt_server.errors import OutOfTurn, UpdateRefused

logger = logging.getLogger(__name__)

FAILED, RUNNING, READY = range(3)
"""How far a rank's staging is; all go on as far as the one that is least far."""


class Weights(Protocol):
    """`DrafterWeights`, as far as it is used here."""

    def stage(self, path: Path, sha256: str | None) -> Staged: ...
    def flip(self) -> None: ...
    def flip_back(self) -> None: ...


@dataclass
class _OnItsWay:
    offer: Offer
    future: "Future[tuple[Staged, float]]"

    def progress(self) -> int:
        if not self.future.done():
            return RUNNING
        return READY if self.future.exception() is None else FAILED

    def failure(self) -> str | None:
        return _reason(self.future.exception()) if self.progress() == FAILED else None


class Drafter:
    """The drafter's versions, in one scheduler process.

    weights: what is copied.
    group: CPU process group of the ranks that hold a part of the drafter.
    between_steps: a context within which copies fall between two decode steps.
    events: told of all that happens.
    start: the drafter that the server was started with.
    """

    def __init__(
        self,
        weights: Weights,
        group: Any,
        between_steps: Callable[[], AbstractContextManager[Any]],
        events: EventLog,
        start: DrafterVersion,
    ) -> None:
        self._weights, self._group, self._between_steps, self._events = weights, group, between_steps, events
        self._thread = ThreadPoolExecutor(1, "drafter-staging")
        self._staging: _OnItsWay | None = None
        self._refused: tuple[int, str] | None = None
        self._newest = start.version
        self._frozen = False
        self.live = start
        self.previous: DrafterVersion | None = None

    def describe(self) -> Described:
        """As our routes show it. How far the staging is, is this rank's word alone."""
        staging = None
        if (on_its_way := self._staging) is not None:
            staging = Staging(on_its_way.offer.version, ready=on_its_way.future.done())
        return Described(self.live, self.previous, staging, self._newest, self._frozen)

    def offer(self, offer: Offer) -> None:
        """Begins to stage a drafter, unless it is in force or on its way already.

        Raises:
            OutOfTurn: it comes too late.
        """
        if self._frozen:
            raise OutOfTurn("the drafter is frozen: POST /tlt/v1/drafter/freeze with frozen false lets updates in")
        if self._is_known(offer):
            return
        ahead = self._newest if self._staging is None else self._staging.offer.version
        if offer.version <= ahead:
            raise OutOfTurn(f"version {offer.version} is too late: {self._ahead_of(offer.version)}; versions only grow")
        if self._staging:
            self._staging.future.cancel()
        self._staging = _OnItsWay(offer, self._thread.submit(self._stage, offer))

    def commit(self, version: int) -> bool:
        """Puts a drafter in force that was offered, once all ranks have it staged; True when it is. A collective.

        Raises:
            UpdateRefused: a rank cannot stage it.
            OutOfTurn: another one overtook it, or all updates are held back.
        """
        staging = self._staging
        if staging is None or staging.offer.version != version:
            return self._committed_before(version)
        if self._frozen:
            raise OutOfTurn("the drafter was frozen while this one was on its way")
        progress = lowest(self._group, staging.progress())
        if progress == RUNNING:
            return False
        self._staging = None
        if progress == FAILED:
            self._refuse(version, "; ".join(objections(self._group, staging.failure())))
        self._put_in_force(staging)
        return True

    def roll_back(self, why: str) -> None:
        """Puts the drafter in force that was before.

        Raises:
            OutOfTurn: there is none, or the last one was brought back already.
        """
        if self.previous is None:
            raise OutOfTurn("there is no drafter to go back to")
        with self._between_steps():
            self._weights.flip_back()
        gone, self.live, self.previous = self.live, self.previous, None
        self._events.add("drafter_rolled_back", version=self.live.version, from_version=gone.version, why=why)

    def freeze(self, frozen: bool) -> None:
        """Holds all updates back, or lets them in again. A rollback is no update."""
        if frozen != self._frozen:
            self._frozen = frozen
            self._events.add("drafter_frozen" if frozen else "drafter_unfrozen", version=self.live.version)

    # -- within --

    def _stage(self, offer: Offer) -> tuple[Staged, float]:
        """In the thread. Returns what was read, and how many seconds that took."""
        began = time.perf_counter()
        staged = self._weights.stage(Path(offer.path), offer.sha256)
        return staged, time.perf_counter() - began

    def _is_known(self, offer: Offer) -> bool:
        if self._staging and offer.version == self._staging.offer.version:
            if (offer.path, offer.sha256) != (self._staging.offer.path, self._staging.offer.sha256):
                raise OutOfTurn(f"version {offer.version} is on its way, from other weights")
            return True
        if offer.version != self.live.version:
            return False
        if None not in (offer.sha256, self.live.sha256) and offer.sha256 != self.live.sha256:
            raise OutOfTurn(f"version {offer.version} is in force, with other weights")
        return True

    def _ahead_of(self, version: int) -> str:
        if version == self._newest:
            return f"it was rolled back, to {self.live.version}"
        if self._staging and version > self._newest:
            return f"version {self._staging.offer.version} is on its way"
        return f"version {self._newest} was in force"

    def _committed_before(self, version: int) -> bool:
        if version == self.live.version:
            return True
        if self._refused and self._refused[0] == version:
            raise UpdateRefused(self._refused[1])
        raise OutOfTurn(f"version {version} is not on its way: another one overtook it")

    def _refuse(self, version: int, why: str) -> None:
        self._refused = version, why
        self._events.add("drafter_refused", version=version, why=why)
        raise UpdateRefused(why)

    def _put_in_force(self, staging: _OnItsWay) -> None:
        staged, seconds = staging.future.result()
        began = time.perf_counter()
        with self._between_steps():
            self._weights.flip()
        took = time.perf_counter() - began
        offer = staging.offer
        self.previous, self._newest = self.live, offer.version
        self.live = DrafterVersion(offer.version, offer.path, offer.trained_on, staged.sha256)
        self._events.add(
            "drafter_swapped",
            version=self.live.version,
            from_version=self.previous.version,
            trained_on=self.live.trained_on,
            staging_s=round(seconds, 6),
            flip_s=round(took, 6),
        )


def _reason(error: BaseException | None) -> str:
    if isinstance(error, UpdateRefused):
        return str(error)
    logger.error("staging a drafter failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
