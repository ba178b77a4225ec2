"""What our HTTP routes and the scheduler say to each other, inside SGLang's own messages, as MessagePack.

    HTTP process ── Ask ──▶ scheduler, on every rank between the same two steps ── Answer, from rank 0 ──▶ HTTP process

Under data parallelism each replica answers for itself. Both ends are of one release, so there is no schema version.
"""

import msgspec
from tlt_client.schemas import (
    DrafterTrainer,
    Event,
    History,
    HistoryLoad,
    SharedTarget,
    Speculation,
    StepTimes,
    StrategyUpdate,
    Versions,
)

from tlt_server.config import Watchfulness
from tlt_server.strategy.arms import ArmTable
from tlt_server.strategy.estimates import Learned


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A session of weight updates begins. selector: for its calls that have none. allow_partial: what it does not carry
    stays active."""

    selector: str | None = None
    allow_partial: bool = False


class End(msgspec.Struct, frozen=True, tag="end"):
    """The session ends."""


class Pausing(msgspec.Struct, frozen=True, tag="pausing"):
    """Generation is being paused by aborting all, of which upstream does not tell the scheduler. Never answered."""


class Continuing(msgspec.Struct, frozen=True, tag="continuing"):
    """Generation is about to continue: was what was written meanwhile the whole target?"""


class Name(msgspec.Struct, frozen=True, tag="name"):
    """The trainer names the active weights."""

    weight_version: str


class ReadVersions(msgspec.Struct, frozen=True, tag="read_versions"):
    """Which versions are active?"""


class ReadEvents(msgspec.Struct, frozen=True, tag="read_events"):
    """What happened after the event of this number?"""

    after: int = 0


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """A drafter to stage: a file, or a folder that holds one. See the client's `DrafterUpdate`."""

    path: str
    version: int
    trained_on: int | None = None
    sha256: str | None = None


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Activate the drafter of this version, if every rank has it staged."""

    version: int


class RollBack(msgspec.Struct, frozen=True, tag="roll_back"):
    """Activate the drafter of before."""


class Freeze(msgspec.Struct, frozen=True, tag="freeze"):
    """Hold updates of the drafter back, or let them in again."""

    frozen: bool


class Wish(msgspec.Struct, frozen=True, tag="wish"):
    """Choose arms like this."""

    update: StrategyUpdate


class ReadStepTimes(msgspec.Struct, frozen=True, tag="read_step_times"):
    """What have decode steps taken? Asked often, so that nothing else is answered."""


class ReadLearned(msgspec.Struct, frozen=True, tag="read_learned"):
    """What has rank 0 learned of the arms?"""


class Learn(msgspec.Struct, frozen=True, tag="learn"):
    """Go on from what was learned before."""

    learned: Learned


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """What all ranks decode by from the next step on, from rank 0. Never answered."""

    table: ArmTable


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Try speculation again that the watchdog has turned off, from rank 0. Never answered."""

    why: str


class HearTrainer(msgspec.Struct, frozen=True, tag="hear_trainer"):
    """How the link to the drafter trainer stands."""

    trainer: DrafterTrainer


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Run no step until memory of these tags is released, or this is taken back: all replicas do, or none."""

    on: bool
    tags: list[str] | None = None


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Give GPU memory of these tags to others; all without any."""

    tags: list[str] | None = None


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Take it back."""

    tags: list[str] | None = None


class SetWatchdog(msgspec.Struct, frozen=True, tag="set_watchdog"):
    """Arm the watchdog, or let it observe only."""

    mode: Watchfulness


class Share(msgspec.Struct, frozen=True, tag="share"):
    """Write to this folder what drafters share with the target, or say how far that is."""

    path: str


class LoadHistory(msgspec.Struct, frozen=True, tag="load_history"):
    """Take responses in that are complete."""

    given: HistoryLoad


class ForgetHistory(msgspec.Struct, frozen=True, tag="forget_history"):
    """Clear the history; what it has of one namespace, if one is named."""

    namespace: str | None = None


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Join a trainer's weight transfer (engine/transfer/group.py), apart from the scheduler's loop; `Advance` tells how
    it goes. One from before ends. rank_offset: the rank of the first replica's first rank. unique_id: of NCCL, 128
    bytes, instead of the store at `address`, a host and a port. backend: nccl or gloo; None: by the device. packed:
    tensors come several as one buffer of bytes, which ends with the one by which it exceeds `chunk_bytes`; else each by
    itself."""

    address: tuple[str, int] | None
    world_size: int
    rank_offset: int
    backend: str | None = None
    unique_id: bytes | None = None
    packed: bool = False
    chunk_bytes: int = 2**30


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """End the transfer, wherever it is. why: for a trainer that waits; None: only where no update is open."""

    why: str | None = None


class Open(msgspec.Struct, frozen=True, tag="open"):
    """An update by transfer begins. held: generation is paused for it alone."""

    held: bool


class Receive(msgspec.Struct, frozen=True, tag="receive"):
    """The trainer sends these tensors, apart from the scheduler's loop; `Advance` writes what came. None of them: those
    of the last time. packed, chunk_bytes: as in `Join`; None: as said there."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    packed: bool | None = None
    chunk_bytes: int | None = None


class Advance(msgspec.Struct, frozen=True, tag="advance"):
    """Take a turn of what a transfer has under way."""


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The update ends. weight_version: the trainer's name for the new weights; None: the target's version."""

    weight_version: str | None = None


class Progress(msgspec.Struct, frozen=True):
    """Of a transfer. writing: an update is open, and has begun to write. working: what was begun last is under way.
    moved: it has come further since the last turn. held: generation is paused for the open update alone. failed: why
    what was begun last came to nothing."""

    writing: bool = False
    working: bool = False
    moved: bool = False
    held: bool = False
    failed: str | None = None


OfDrafter = Offer | Commit | RollBack | Freeze | SetWatchdog
OfWeights = Begin | End | Pausing | Continuing | Name | Hold | Release | Resume
OfTransfer = Join | Leave | Open | Receive | Advance | Close
OfHistory = LoadHistory | ForgetHistory
OfRankZero = Announce | Probe
OfReports = ReadVersions | ReadEvents | ReadStepTimes | ReadLearned | HearTrainer
Ask = OfDrafter | OfWeights | OfTransfer | OfRankZero | OfReports | OfHistory | Wish | Learn | Share


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one replica answers.

    refusal: why nothing was done; None where it was. out_of_turn: it was refused for what is active, not for what it
    is. invalid: it was refused for settings that cannot be. failure: what went wrong on our side. devices: of all ranks
    of the replica. held: no step runs until generation continues or memory comes back. offloaded: tags of memory that
    is released. weight_version: the trainer's name for what would sample now, while a publication is under way its own.
    """

    refusal: str | None = None
    out_of_turn: bool = False
    invalid: bool = False
    failure: str | None = None
    versions: Versions | None = None
    trainer: DrafterTrainer | None = None
    events: list[Event] | None = None
    step_times: StepTimes | None = None
    speculation: Speculation | None = None
    learned: Learned | None = None
    history: History | None = None
    shared: SharedTarget | None = None
    progress: Progress | None = None
    offloaded: list[str] = []
    devices: list[str] = []
    held: bool = False
    weight_version: str | None = None


def pack(message: Ask | Answer) -> bytes:
    return msgspec.msgpack.encode(message)


def unpack_ask(body: bytes) -> Ask:
    ask: Ask = msgspec.msgpack.decode(body, type=Ask)
    return ask


def unpack_answer(body: bytes) -> Answer:
    return msgspec.msgpack.decode(body, type=Answer)
