"""Which drafter is active, which is on its way, and which can come back: on every rank the same.

A drafter is offered, staged by a thread, and made active when every rank has staged it. Each of these is a message
that all ranks handle between the same two steps, and what they decide follows from messages and from counts of tokens,
never from a clock. How far its own thread is, a rank tells the others when they are about to act: together, or not.

    versions         only grow: one that is offered must be above all that were ever active. Only a rollback brings an
                     older one back, under its own number
    a duplicate      of the active version, or on its way, is that one: offering it again changes nothing
    two at once      the newer overtakes: the older is never made active, and who offered it is told so
    an older one     is refused, and so is one that was rolled back
    a worse one      is found by the watchdog. Armed, it goes back to the last trusted one, or turns speculation off
                     where there is none, until another one is made active, or a probe shows it worth its while
    previous         is the drafter of before. But while the watchdog is armed, one that is overtaken on trial is not
                     kept: previous stays the trusted one, and whoever rolls back gets that
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tlt_client.schemas import Drafter as Described
from tlt_client.schemas import DrafterVersion, Staging

from tlt_server.config import Arm, Watchfulness
from tlt_server.engine.decode.speculation import Speculation
from tlt_server.engine.events import EventLog
from tlt_server.engine.messages import Offer
from tlt_server.engine.ranks import lowest, objections
from tlt_server.engine.weights.staging import FAILED, RUNNING, OnItsWay
from tlt_server.engine.weights.swap import DrafterWeights
from tlt_server.engine.weights.watchdog import Watchdog
from tlt_server.errors import OutOfTurn, UpdateRefused


class Drafter:
    """The drafter's versions, in one scheduler process.

    group: CPU process group of the ranks that hold a part of the drafter. between_steps: a context within which copies
    fall between two decode steps. start: the drafter that the server was started with. speculation: held while there is
    no drafter worth it. untrained: whether the drafter of the start has learnt nothing yet: it is never drafted with.
    follows: whether it is an MTP head that the target's publications bring, and nothing else may.
    """

    def __init__(
        self,
        weights: DrafterWeights,
        group: Any,
        between_steps: Callable[[], AbstractContextManager[Any]],
        events: EventLog,
        start: DrafterVersion,
        watchdog: Watchdog,
        speculation: Speculation,
        *,
        untrained: bool = False,
        follows: bool = False,
    ) -> None:
        self._weights, self._group, self._between_steps, self._events = weights, group, between_steps, events
        self._speculation = speculation
        self._trusted: int | None = start.version
        self.watchdog = watchdog
        self._thread = ThreadPoolExecutor(1, "drafter-staging")
        self._staging: OnItsWay | None = None
        self._refused: tuple[int, str] | None = None
        self._newest = start.version
        self.frozen, self._follows = False, follows
        self.live = start
        self.previous: DrafterVersion | None = None
        self._untrained = start.version if untrained else None
        self.cache_era = 0
        self._began()

    def describe(self) -> Described:
        """As our routes show it. How far the staging is, is this rank's word alone."""
        way = self._staging
        staging = None if way is None else Staging(way.offer.version, ready=way.future.done())
        return Described(self.live, self.previous, staging, self._newest, self.frozen, self.watchdog.describe())

    def offer(self, offer: Offer) -> None:
        """Begins to stage a drafter, unless it is active or on its way already. Raises OutOfTurn: it comes too late.
        Raises UpdateRefused: it comes by another way."""
        if self._follows:
            raise UpdateRefused(
                "the MTP head comes with the target's publications, which one writer makes. To bring it by this route, "
                'serve with mtp = "updates" in --tlt-config'
            )
        if self.frozen:
            raise OutOfTurn("the drafter is frozen: POST /tlt/v1/drafter/freeze with frozen false lets updates in")
        if self._is_known(offer):
            return
        ahead = self._newest if self._staging is None else self._staging.offer.version
        if offer.version <= ahead:
            raise OutOfTurn(f"version {offer.version} is too late: {self._ahead_of(offer.version)}; versions only grow")
        if self._staging:
            self._staging.future.cancel()
        self._staging = OnItsWay(offer, self._thread.submit(self._stage, offer))

    def commit(self, version: int) -> bool:
        """Makes a drafter active that was offered, once all ranks have it staged; True when it is. A collective.

        Raises UpdateRefused: a rank cannot stage it.
        Raises OutOfTurn: another one overtook it, or all updates are held back.
        """
        staging = self._staging
        if staging is None or staging.offer.version != version:
            return self._committed_before(version)
        if self.frozen:
            raise OutOfTurn("the drafter was frozen while this one was on its way")
        progress = lowest(self._group, staging.progress())
        if progress == RUNNING:
            return False
        self._staging = None
        if progress == FAILED:
            why = "; ".join(objections(self._group, staging.failure()))
            self._refused = version, why
            self._events.add("drafter_refused", version=version, why=why)
            raise UpdateRefused(why)
        sha256, seconds = staging.future.result()
        offer = staging.offer
        self._activate(DrafterVersion(offer.version, offer.path, offer.trained_on, sha256), seconds)
        return True

    def follow(self, target: int) -> None:
        """Makes an MTP head active that is staged on all ranks. target: the version that it was published with."""
        self._activate(DrafterVersion(self._newest + 1, self.live.path, target, None), 0.0)

    def roll_back(self, why: str) -> None:
        """Makes the drafter active that was before. Raises OutOfTurn: there is none, or the last one was brought back
        already."""
        if self.previous is None:
            raise OutOfTurn("there is no drafter to go back to")
        with self._between_steps():
            self._weights.flip_back()
        gone, self.live, self.previous = self.live, self.previous, None
        self._events.add(
            "drafter_rolled_back",
            version=self.live.version,
            from_version=gone.version,
            why=why,
            recovery_s=round(time.monotonic() - self._since, 6),
            steps=self._steps,
        )
        self._leave_cache()
        self.watchdog.hear("rollback", trusted=self.live.version == self._trusted)
        self._began()

    def reset(self) -> None:
        """Random values take its place, under its number: for who checks that an update brings all of it back."""
        with self._between_steps():
            self._weights.reset()
        self.cache_era += 1

    def freeze(self, frozen: bool) -> None:
        """Holds all updates back, or lets them in again. A rollback is no update."""
        if frozen != self.frozen:
            self.frozen = frozen
            self._events.add("drafter_frozen" if frozen else "drafter_unfrozen", version=self.live.version)

    # -- what the watchdog finds --

    def settled(self, version: int, arm: Arm, accepted: Sequence[tuple[str, int]]) -> None:
        """A step that was launched with the drafter of this version, in this arm: accepted drafts, by request."""
        if version != self.live.version or self._speculation.held is not None:
            return
        self._steps += 1
        if (finding := self.watchdog.observe(arm, accepted)) is not None:
            self._act(finding)

    def set_watchdog(self, mode: Watchfulness) -> None:
        """Arms it, or lets it observe only."""
        if mode != self.watchdog.mode:
            self.watchdog.mode = mode
            self._events.add("watchdog_set", version=self.live.version, mode=mode)

    def probe(self, why: str) -> None:
        """Tries it again, under watch, unless it is on by now."""
        if self._speculation.held is not None:
            self.watchdog.hear("probe")
            self._speculation.release(f"probing, as {why}")

    def stop(self, why: str, *, probe: bool = False) -> None:
        """Holds speculation off, until another drafter is active; or until it is probed, if it is to be."""
        self._trusted = None
        self.watchdog.hear("off", probe=probe)
        self._speculation.hold(why)

    def _act(self, finding: dict[str, Any]) -> None:
        told = {"version": self.live.version, **finding}
        if not finding["worse"]:
            self._events.add("drafter_kept", **told)
            return
        action = self._remedy(finding)
        self._events.add("accept_length_collapsed", **told, action=action)
        found, least, since = (finding[name] for name in ("accept_length", "least", "since"))
        why = f"accept length {found:.2f} since {since}, at least {least:.2f} was demanded"
        if action == "rolled_back":
            self.roll_back(why)
        elif action == "speculation_off":
            self.stop(why, probe=True)

    def _remedy(self, finding: dict[str, Any]) -> str:
        """What a collapse is answered with: `rolled_back`, `speculation_off` or `none`."""
        if self.watchdog.mode is Watchfulness.OBSERVE:
            return "none"
        if self._has_way_back:
            return "rolled_back"
        return "none" if self.watchdog.trusted and not finding["under_floor"] else "speculation_off"

    @property
    def _has_way_back(self) -> bool:
        """Whether the active drafter is on trial, and a trusted one is kept."""
        return not self.watchdog.trusted and self.previous is not None and self.previous.version == self._trusted

    # -- within --

    def _leave_cache(self) -> None:
        """New requests share no prefix that a drafter nobody trusts has read: of its keys and values the next one makes
        nothing (docs/results/reload.md says what that costs). Those of a trusted one serve its successor as well."""
        self.cache_era += not self.watchdog.trusted

    def _began(self) -> None:
        """A drafter was made active."""
        self._since, self._steps = time.monotonic(), 0
        if self.live.version == self._untrained:
            self.stop("the drafter has learnt nothing yet")
        elif self._speculation.held is not None:
            self._speculation.release(f"drafter {self.live.version} is active")

    def _stage(self, offer: Offer) -> tuple[str, float]:
        """In the thread. Returns the file's sha256, and how many seconds it took."""
        began = time.perf_counter()
        sha256 = self._weights.stage(Path(offer.path), offer.sha256)
        return sha256, time.perf_counter() - began

    def _is_known(self, offer: Offer) -> bool:
        if self._staging and offer.version == self._staging.offer.version:
            if (offer.path, offer.sha256) != (self._staging.offer.path, self._staging.offer.sha256):
                raise OutOfTurn(f"version {offer.version} is on its way, from other weights")
            return True
        if offer.version != self.live.version:
            return False
        if None not in (offer.sha256, self.live.sha256) and offer.sha256 != self.live.sha256:
            raise OutOfTurn(f"version {offer.version} is active, with other weights")
        return True

    def _ahead_of(self, version: int) -> str:
        if version == self._newest:
            return f"it was rolled back, to {self.live.version}"
        if self._staging and version > self._newest:
            return f"version {self._staging.offer.version} is on its way"
        return f"version {self._newest} was active"

    def _committed_before(self, version: int) -> bool:
        if version == self.live.version:
            return True
        if self._refused and self._refused[0] == version:
            raise UpdateRefused(self._refused[1])
        raise OutOfTurn(f"version {version} is not on its way: another one overtook it")

    def _activate(self, version: DrafterVersion, staging_s: float) -> None:
        remember = self.watchdog.mode is Watchfulness.OBSERVE or not self._has_way_back
        began = time.perf_counter()
        with self._between_steps():
            self._weights.flip(remember=remember)
        took = time.perf_counter() - began
        if self.watchdog.trusted:
            self._trusted = self.live.version
        gone, self.live = self.live, version
        self.previous, self._newest = gone if remember else self.previous, version.version
        self._events.add(
            "drafter_swapped",
            version=self.live.version,
            from_version=gone.version,
            trained_on=self.live.trained_on,
            staging_s=round(staging_s, 6),
            flip_s=round(took, 6),
        )
        self._leave_cache()
        self.watchdog.hear("drafter")
        self._began()
