"""HTTP schemas of the routes that tlt-server adds under /tlt/v1. The server imports them from here.

Unknown fields are ignored when decoding, so that an older client reads a newer server.
"""

from typing import Annotated, Literal

import msgspec


class Arm(msgspec.Struct, frozen=True, omit_defaults=True):
    """A way to draft. As text what `--arm` takes."""

    num_steps: int
    """Draft steps, which is the depth of the tree."""
    topk: int
    """Branches per step; 1 is a chain."""
    num_draft_tokens: int
    """Tokens that one target pass verifies, the root counted."""
    source: str = "drafter"
    """`history`: drafts are what was said to the same prompt before."""

    def __str__(self) -> str:
        own = f"{self.num_steps},{self.topk},{self.num_draft_tokens}"
        return own if self.source == "drafter" else f"{self.source}:{self.num_steps}"


class Models(msgspec.Struct, frozen=True):
    """Where the weights came from at start."""

    target: str
    drafter: str | None


class AcceptLength(msgspec.Struct, frozen=True):
    """Tokens per verifying target pass, bonus token counted; None before the first one."""

    recent: float | None
    """Over the server's last reporting interval."""
    total: float | None
    """Since the server started."""


class Counters(msgspec.Struct, frozen=True):
    """Since the server started, over all requests; they only grow."""

    drafts: int
    """Drafts that were verified, counted per request: the verify calls of all rollouts together."""
    draft_tokens: int
    """Drafted tokens that the target was asked about."""
    accepted_tokens: int
    """Those that it accepted; bonus tokens are not among them."""
    per_position: tuple[int, ...]
    """Accepted tokens by depth in the draft, from the first; they add up to `accepted_tokens`."""


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


class TargetShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /tlt/v1/target/share`: write embedding and head of the target, which a drafter has too, to a folder."""

    path: str
    """On the server's machine: the folder to make."""


class SharedTarget(msgspec.Struct, frozen=True):
    """What was written: a safetensors file in the folder `path`, of this version of the target and no other."""

    target_version: int
    path: str


class DrafterWatchdog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`PUT /tlt/v1/drafter/watchdog`."""

    mode: Literal["armed", "observe"]


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


class Load(msgspec.Struct, frozen=True):
    """Requests that a server has, over all replicas."""

    running: int
    waiting: int


class CapturedPass(msgspec.Struct, frozen=True):
    """A pass of decode steps, captured as a CUDA graph for each of some batch sizes."""

    kind: str
    """`verification`, `drafting`, `draft-extend`; `plain`, of steps that do not speculate."""
    arms: tuple[Arm, ...]
    """That have it; none where it is `plain`."""
    sizes: tuple[int, ...]
    """Batch sizes, ascending."""
    gb: float
    """By how much the card's free memory fell."""
    buffers_gb: float
    """Of it, the graphs' inputs and what attention keeps for them."""
    driver_gb: float
    """Of it, what the driver keeps of the graphs."""


class CapturedArm(msgspec.Struct, frozen=True):
    """How far an arm has CUDA graphs."""

    arm: Arm
    largest: int
    """Batch size; 0: it did not fit, and the server is without it."""
    wanted: int
    """What that would be, were memory for graphs not bounded."""


class Graphs(msgspec.Struct, frozen=True):
    """The CUDA graphs of decode steps, on one GPU."""

    sharing: str
    """`pool`; `none`: each arm has all of its own."""
    gb: float
    """That they take together."""
    budget_gb: float | None
    """That they may take; None: it is not bounded."""
    arms: tuple[CapturedArm, ...]
    """None on a CPU."""
    passes: tuple[CapturedPass, ...]
    """In the order of capture; none on a CPU."""
    help: str
    """One line for a person."""


class History(msgspec.Struct, frozen=True):
    """`GET /tlt/v1/history`: what is remembered of responses, in each rank; counts are since the server started."""

    tokens: int
    """That are kept."""
    capacity: int
    """Tokens; what was written first is forgotten first."""
    bytes: int
    """Of memory, reserved."""
    written: int
    """Tokens taken in."""
    lookups: int
    """Requests that a step asked drafts for."""
    found: int
    """Of them, those that it found some for."""
    drafted: int
    """Tokens."""
    accepted: int
    """Of them."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /tlt/v1/status`."""

    version: str
    """Of tlt-server."""
    sglang_version: str
    """Of the fork that serves, as 0.5.17+tlt.<hash of the patch series>."""
    models: Models
    speculation: bool
    """Whether the server was started with a drafter."""
    arm: Arm | None
    """In force now; None: drafting is off."""
    accept_length: AcceptLength
    counters: Counters
    versions: Versions | None = None
    """None from a server that is older than this."""
    trainer: DrafterTrainer | None = None
    """None from a server that follows none."""
    devices: list[str] = []
    """That it computes on, under names that a trainer on the same machine has for them too."""
    graphs: Graphs | None = None
    """None from a server without a drafter, or older than this."""
    history: History | None = None
    """None from a server that keeps none, or older than this."""
    load: Load | None = None
    """None from a server that is older than this; likewise the next three."""
    generated_tokens: int | None = None
    """That decode steps gave since the server started, of all requests."""
    time: float | None = None
    """Of this answer, seconds since 1970."""
    paused: bool | None = None
    """Whether generation is paused: requests wait."""
    offloaded: list[str] = []
    """Kinds of memory that are released: `kv_cache`, `weights`, `cuda_graph`."""
    uptime_s: float
    help: str
    """One line for a person: what this state means and what to do about it, if anything."""


class SelectionBucket(msgspec.Struct, frozen=True):
    """Batch sizes that share what is learned of their arms."""

    first: int
    """The smallest; the largest is the one before the next bucket's."""
    arms: tuple[Arm | None, ...]
    """Those that compete; None: off, which is plain decoding."""


class StrategyUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`PUT /tlt/v1/strategy`: how to choose arms, from the next decode step on. All of it replaces what was."""

    mode: str
    """`bandit`; `paper`: BEG-MAB as published; `pinned`: one arm, and off beyond its largest batch size; `off`."""
    pinned: Arm | None = None
    """The arm of mode `pinned`; None: the first that the server was started with."""
    buckets: tuple[SelectionBucket, ...] | None = None
    """Ascending from batch size 1; None: the server's own."""
    epsilon: float = 0.1
    """Mode `paper`: how often it explores."""
    window: int = 300
    """Mode `paper`: rewards that an arm's median is taken of. The report's medians are, in every mode."""
    exploration: float = 0.015
    """Mode `bandit`: the share of decoding time that exploration may lose, against the best arm known."""


class ArmReport(msgspec.Struct, frozen=True):
    """An arm in a bucket."""

    arm: Arm | None
    """None: off."""
    pulls: int
    """Decode steps whose time counted."""
    seconds: float
    """Of those steps together."""
    median_reward: float | None
    """Committed tokens per second, of all requests together; None before the first pull."""
    expected_reward: float
    """What mode `bandit` expects, at the batch and context of the bucket's last step."""
    accept_length: float
    """Expected tokens per verify and request, the bonus token included."""
    step_ms: float
    """Expected milliseconds of a step, likewise."""


class BucketReport(msgspec.Struct, frozen=True):
    """A bucket."""

    first: int
    last: int
    active: Arm | None
    """What a batch of this size is decoded with; None: off."""
    arms: tuple[ArmReport, ...]
    in_force: Arm | None = None
    """The former name of `active`; it goes with the next release."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "in_force", self.active)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """How a server chooses arms, and what came of it."""

    mode: str
    epsilon: float
    window: int
    exploration: float
    explored_s: float
    """Seconds of decoding of mode `bandit` that exploration steps took: with other arms than the best."""
    explored_lost_s: float
    """What that cost: those seconds, less what the best arm would have taken for the same tokens."""
    decoded_s: float
    """Seconds of decoding that counted."""
    lost: int
    """Steps whose result never came; more than a few are a bug."""
    unmatched: int
    """Results of no known step; likewise."""
    buckets: tuple[BucketReport, ...]
    selecting_us: float | None = None
    """Microseconds of a decode step that go to choosing an arm and to learning from the result: mean of the last
    thousand steps with these settings; None before the first, and from an older server."""


class Speculation(msgspec.Struct, frozen=True):
    """`GET /tlt/v1/strategy`."""

    mode: str
    """What was asked for: `bandit`, `paper`, `pinned` or `off`; `StrategyUpdate` says what they are."""
    on: bool
    """Whether decode steps may speculate now. A step does where its batch has an active arm."""
    held: str | None
    """Why they do not, though they should."""
    arm: Arm | None
    """Of the last step that speculated; None where the server was started without a drafter."""
    arms: tuple[Arm, ...] = ()
    """Those that the server was started with."""
    selection: Selection | None = None
    """None from a server without a drafter, or older than this."""
    graphs: Graphs | None = None
    """Likewise."""


TokenIds = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(min_length=1)]


class HistoryLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`POST /tlt/v1/history`: responses to a prompt, to draft others from. Several megabytes at once keep steps waiting
    for a tenth of a second."""

    prompt: TokenIds
    responses: Annotated[list[TokenIds], msgspec.Meta(min_length=1)]
    version: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    """A number for the weights that said them; None: that of the active ones. It is kept, and weighs nothing yet."""
    namespace: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    """As in requests' `history_namespace`."""


# -- of several servers behind one URL --


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
    """A member's new state; `joined`, `published`, `renamed`, `recalled`, `setting_refused`, `log_failed`; later
    versions have others."""
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
