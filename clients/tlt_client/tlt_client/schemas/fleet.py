"""Several servers behind one URL."""

import msgspec


class FleetMember(msgspec.Struct, frozen=True, kw_only=True):
    """A server of a fleet."""

    name: str
    url: str
    state: str
    """`joining`: it has not answered yet. `stale`: it lacks the fleet's weights, or is not known to have them. `ready`:
    it is sent requests. `suspect`: of late it did not answer. `quarantined`: it is out until it has the fleet's
    weights again. `retired`: it was taken out."""
    why: str
    """It is not ready; empty where it is."""
    weight_version: str | None
    """That it said last."""
    running: int
    """Requests that the fleet has sent it and that it has not answered."""
    since: float
    """Seconds since 1970 when its state began."""


class FleetTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """A control call that is under way on all members."""

    call: str
    """Method and path."""
    phase: str
    """`prepare`, `apply` or `undo`."""
    version: str | None
    """The weights that the fleet is to have afterwards."""
    members: tuple[str, ...]
    waiting_for: tuple[str, ...]
    """Members that have not answered in this phase."""
    since: float


class FleetEvent(msgspec.Struct, frozen=True):
    """Something that happened to a fleet."""

    number: int
    """Counts up from 1 since the front started."""
    time: float
    """Seconds since 1970."""
    kind: str
    """A member's new state; `joined`, `published`, `renamed`, `recalled`, `setting_refused`, `log_failed`,
    `keeper_failed`; later versions have others."""
    replica: str | None
    """None: of the whole fleet."""
    detail: str


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /tlt/v1/fleet`."""

    weight_version: str | None
    """Of the weights that every request is sampled by; None: no member has joined yet."""
    min_ready: int
    """Members that must be ready; with fewer, requests wait."""
    paused: bool
    """Whether requests wait for a trainer: it has paused, or a publication is under way."""
    held: int = 0
    """Requests that wait."""
    transaction: FleetTransaction | None
    replicas: tuple[FleetMember, ...]
    events: tuple[FleetEvent, ...]
    """The last hundred, oldest first."""
