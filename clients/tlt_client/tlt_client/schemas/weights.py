"""What samples, and what became of it: targets, drafters and who sends them."""

from typing import Annotated, Literal

import msgspec


class TargetVersion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The active target."""

    version: int
    """How many publications are complete: it only grows. One may take dozens of calls."""
    weight_version: str
    """The trainer's own name for it."""
    partial: bool
    """Whether a publication is under way: what is sampled now is from neither the old target nor the new one."""
    missing: tuple[str, ...] = ()
    """The first ten tensors that the last publication lacked; left out where it was whole."""


class DrafterVersion(msgspec.Struct, frozen=True):
    """A drafter."""

    version: int
    """Its number for ever; 0 is the one that the server was started with."""
    path: str
    """Where the server read it."""
    trained_on: int | None
    """The target's version that it was trained on, if its trainer said."""
    sha256: str | None
    """Of its file; None for the one that the server was started with."""


class Staging(msgspec.Struct, frozen=True):
    """A drafter on its way."""

    version: int
    ready: bool
    """Whether it was read and checked, well or not, by the rank that answers."""


class Watch(msgspec.Struct, frozen=True):
    """What the watchdog knows of the active drafter. Lengths are accept lengths."""

    mode: str
    """`armed`: a drafter that is plainly worse goes, or speculation is turned off; `observe`: it is only said."""
    state: str
    """`gathering` what the next drafter will be held against; `settled`: there is enough of it; `watching` since the
    event below; `worse`, and still active; `off`: speculation is."""
    event: str
    """The last one: `start`, `drafter` (another one active), `target` (another one published), `memory` (resumed),
    `rollback`, `off`, `probe` (it is tried again)."""
    event_time: float
    """Seconds since 1970."""
    steps: int
    """Decode steps that it saw since then."""
    accept_length: float | None
    """Of late, not from before the event."""
    before: float | None
    """Before the event, if it was seen long enough."""
    baseline: float | None
    """What the drafter is held against while it is watched; later, what it gives others to be held against."""
    least: float | None
    """While it watches: below this the drafter is plainly worse."""
    probe_time: float | None = None
    """While it keeps speculation off: seconds since 1970 when it is tried again, if neither target nor drafter changes
    before; None: the next drafter turns it on, or it is on, or the server is older than this."""


class Drafter(msgspec.Struct, frozen=True):
    """`GET /tlt/v1/drafter`."""

    live: DrafterVersion
    """The active one."""
    previous: DrafterVersion | None
    """The one that a rollback brings back."""
    staging: Staging | None
    newest: int
    """The highest version that was ever active: one that is offered must be above it."""
    frozen: bool
    """Whether updates are held back."""
    watch: Watch | None = None
    """None from a server that is older than this."""


class DrafterUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`POST /tlt/v1/drafter/update`: a drafter for the server to read, check and activate."""

    path: str
    """On the server's machine: a safetensors file, or a folder that holds one. It must not change until answered."""
    version: Annotated[int, msgspec.Meta(ge=0, le=2**52)] | None = None
    """Above every one before; None: the next. Offering a version again changes nothing."""
    trained_on: Annotated[int, msgspec.Meta(ge=0, le=2**52)] | None = None
    """The target's version that it was trained on."""
    sha256: str | None = None
    """What the file's must be, in hexadecimal."""


class DrafterFreeze(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /tlt/v1/drafter/freeze`."""

    frozen: bool = True


class DrafterWatchdog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`PUT /tlt/v1/drafter/watchdog`."""

    mode: Literal["armed", "observe"]


class TargetShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /tlt/v1/target/share`: write embedding and head of the target, which a drafter has too, to a folder."""

    path: str
    """On the server's machine: the folder to make."""


class SharedTarget(msgspec.Struct, frozen=True):
    """What was written: a safetensors file in the folder `path`, of this version of the target and no other."""

    target_version: int
    path: str


class Versions(msgspec.Struct, frozen=True):
    """The active weights."""

    target: TargetVersion
    drafter: Drafter | None = None
    """None where the server was started without one."""


class Event(msgspec.Struct, frozen=True):
    """Something that happened to a server's weights."""

    number: int
    """Counts up from 1 in each replica."""
    time: float
    """Seconds since 1970."""
    kind: str
    """`target_published`, `_incomplete`; `drafter_swapped`, `_refused`, `_rolled_back`, `_frozen`, `_unfrozen`;
    `memory_released`, `_resumed`; `trainer_connected`, `_lost`; of the watchdog: `drafter_kept`,
    `accept_length_collapsed`, `speculation_off`, `speculation_on`, `watchdog_set`; later versions have others."""
    replica: int
    """Of data parallelism; 0 without it."""
    detail: dict[str, str | int | float | bool | None]
    """What is to be said of an event of this kind."""


TrainedUntil = Literal["taken", "judged", "active"]


class TrainSteps(msgspec.Struct, frozen=True):
    """`POST /tlt/v1/train/steps`, to a drafter trainer that trains on demand."""

    steps: Annotated[int, msgspec.Meta(ge=0, le=100_000)]
    """Of training, a pack of features each (of each of the trainer's processes); 0: what they gave so far is judged."""
    within_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 60.0
    """What is not over by then is left as it is."""
    until: TrainedUntil = "active"
    """What is waited for. `taken`: the steps; a later demand has what they gave judged, which takes as long as several.
    `judged`: that too, and what is better than the active drafter is on its way. `active`: it has arrived."""


class TrainedSteps(msgspec.Struct, frozen=True):
    """What became of them."""

    steps: int
    """That were taken."""
    seconds: float
    """With the judgement after them, and the way of what was published."""
    published: int
    """The newest drafter that the trainer has published; 0: none."""
    active: int
    """The newest that is active on a server; 0: the one of its start."""
    waits_for: str = ""
    """Where the time was over first: what the trainer does, or waits for."""


class DrafterTrainer(msgspec.Struct, frozen=True, kw_only=True):
    """The drafter trainer that a server follows, and how the link to it stands; `POST /tlt/v1/trainer`."""

    address: str
    connected: bool
    """Whether it answers."""
    received: int | None = None
    """The last drafter that arrived whole; whether it is active, the drafter's versions say."""
    refused: int | None = None
    """The last drafter that was turned away before it was whole."""
    reason: str = ""
    """Why it was."""
