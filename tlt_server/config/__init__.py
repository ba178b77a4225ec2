"""Our own settings of the rollout server, checked once, at the door; nothing below reads argv or the environment.

The command line builds a `ServerConfig` and hands it to SGLang's processes in one environment variable: they are
spawned, so they share no memory with it. The variable is also what wakes the seams of the fork: where it is not set,
patched SGLang behaves as upstream's.
"""

import os
import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

import msgspec

from tlt_server.config.arm import CANDIDATES, Arm, widest
from tlt_server.errors import ConfigError

__all__ = [
    "AUTO",
    "CANDIDATES",
    "ENVIRONMENT_VARIABLE",
    "MTP",
    "NONE",
    "Arm",
    "Dialect",
    "DrafterForm",
    "DrafterKind",
    "Features",
    "GraphSharing",
    "HeadSource",
    "ServerConfig",
    "Trainer",
    "Watchfulness",
    "beside",
    "drafter_cache",
    "read_toml",
    "widest",
]

T = TypeVar("T")
ENVIRONMENT_VARIABLE = "TLT_SERVER_CONFIG"
AUTO = "auto"
"""In place of a drafter: make one that has learnt nothing yet. In place of arms: find them."""
MTP = "mtp"
"""In place of a drafter: the head that the target's own checkpoint carries."""
NONE = "none"
"""In place of a drafter: history alone drafts."""


class DrafterKind(StrEnum):
    """A family of drafters, as the command line and the config file name it."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"


class DrafterForm(StrEnum):
    """In which an exported drafter lies: whose names and config."""

    SGLANG = "sglang"
    VLLM = "vllm"
    SPECULATORS = "speculators"


class Trainer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The drafter trainer that the server follows.

    address: where it listens, `tcp://HOST:PORT` or `ipc://PATH`.
    features: where it listens for features; None: the port after that one, or its path with `.features` after it.
    server: what it knows this server as; None: HOST:PORT, by the machine's name.
    folder: where drafters arrive, this server's alone; two must fit. None: in memory if they fit there, else on disk.
    key: file of this side's CURVE certificate, the secret one; None: no encryption, so on this machine only.
    trainer_key: file of the trainer's, the public one.
    """

    address: str
    features: str | None = None
    server: str | None = None
    folder: str | None = None
    key: str | None = None
    trainer_key: str | None = None

    def __post_init__(self) -> None:
        if (self.key is None) != (self.trainer_key is None):
            raise ConfigError("trainer: key and trainer_key belong together, give both or neither")

    @property
    def features_address(self) -> str:
        """Where features go."""
        return self.features or beside(self.address)

    def name_of(self, port: int) -> str:
        """What the trainer knows a server on this port of this machine as."""
        return self.server or f"{socket.gethostname()}:{port}"


def beside(control: str) -> str:
    """Where a trainer with this control link listens for features by default. ConfigError: no port to count from."""
    if control.startswith("ipc://"):
        return f"{control}.features"
    place, _, port = control.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"link {control}: no port to count on from. Name an address for features, too")
    return f"{place}:{int(port) + 1}"


class Features(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the drafter trainer is sent of the target's hidden states. budget_mb_s: megabytes a second at most, on
    average, of each replica. share: of the requests that may be among those."""

    on: bool = True
    budget_mb_s: Annotated[float, msgspec.Meta(gt=0)] = 100.0
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class Watchfulness(StrEnum):
    """What the watchdog does about a drafter that is plainly worse than the one before.

    armed: rolls it back, or turns speculation off where there is none to go back to.
    observe: says so.
    """

    ARMED = "armed"
    OBSERVE = "observe"


class Dialect(StrEnum):
    """Whose HTTP API the server speaks, where two have a route of one name.

    sglang: SGLang's.
    vllm: vLLM's, its weight transfer included; SGLang's routes that vLLM has not are there, too.
    """

    SGLANG = "sglang"
    VLLM = "vllm"


class HeadSource(StrEnum):
    """What brings an MTP head's new weights; the other is refused, so that two writers never race.

    TARGET: the target's publications, by every route, made active with it.
    UPDATES: `POST /tlt/v1/drafter/update`, as for drafters of other kinds.
    """

    TARGET = "target"
    UPDATES = "updates"


class GraphSharing(StrEnum):
    """What the CUDA graphs of several arms have in common.

    pool: the passes that can be shared, and one memory pool; each arm is captured as far as it may be chosen.
    none: nothing. Each arm is captured at all batch sizes, in a pool of its own: for comparison.
    """

    POOL = "pool"
    NONE = "none"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `tlt-server serve` adds to SGLang's flags.

    drafter: folder or hub name of the EAGLE or EAGLE-3 drafter; `auto`: one is made, and not used before another is
        sent; `mtp`: the target's own head; `none`: there is none, and all arms are of history; None: the embedded one
        for the embedded target, else no speculation.
    mtp: what brings an MTP head's new weights.
    drafter_kind: what `auto` makes.
    arms: those that a step may be decoded with, beside plain decoding; `auto`: of `CANDIDATES` those that can pay on
        this machine, as timed when the server starts.
    auto_history: tokens that arms of history draft, which `auto` tries beside the drafter's.
    graph_sharing: what the arms' CUDA graphs have in common.
    graph_memory_gb: 10⁹ bytes of each GPU that CUDA graphs of decode steps may take; arms, or their larger batches, are
        left out where they do not fit. None: any.
    speculation: False serves without a drafter whatever `drafter` says.
    draft_vocab: tokens that an EAGLE drafter proposes of, the most frequent ones here, where it reads the target's
        head and one GPU holds it; 0: all. None: 32,768 on a GPU, of a vocabulary at least twice as large.
    history_tokens: of responses that each rank remembers, where an arm is of history; of memory, 48 bytes each.
    prefill_delay_steps: decode steps that a request may wait at most for others to be prefilled with; 0: none.
    publication_silence_s: seconds without a call, after which a run of calls that carry weights has ended, where its
        trainer neither opens a session nor pauses.
    allow_partial: whether a publication may leave tensors of the target as they are; one of a session may as the
        session says.
    trainer: the drafter trainer to follow; None: drafters come over HTTP alone.
    features: what it is sent to learn from.
    watchdog: what it does about a drafter that is plainly worse than the one before.
    accept_length_floor: the accept length below which speculation is not worth its while, whatever was before.
    step_log: a file that gets a line for every settled step (engine/steplog.py), for measurements; None: no file.
    strict_fields: whether a request with a field that nobody knows is refused; else it is told what was ignored.
    dialect: whose HTTP API it speaks.
    transfer_timeout_s: seconds without a byte, after which a trainer that sends weights by vLLM's transfer is gone.
    """

    drafter: str | None = None
    drafter_kind: DrafterKind = DrafterKind.EAGLE
    mtp: HeadSource = HeadSource.TARGET
    arms: Annotated[tuple[Arm, ...], msgspec.Meta(min_length=1)] | Literal["auto"] = (Arm(3, 1, 4),)
    auto_history: tuple[Annotated[int, msgspec.Meta(ge=1)], ...] = ()
    graph_sharing: GraphSharing = GraphSharing.POOL
    graph_memory_gb: float | None = None
    speculation: bool = True
    draft_vocab: Annotated[int, msgspec.Meta(ge=0)] | None = None
    history_tokens: Annotated[int, msgspec.Meta(ge=1024, le=2**31)] = 2**24
    prefill_delay_steps: Annotated[int, msgspec.Meta(ge=0)] = 32
    publication_silence_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    allow_partial: bool = False
    trainer: Trainer | None = None
    features: Features = Features()
    watchdog: Watchfulness = Watchfulness.ARMED
    accept_length_floor: Annotated[float, msgspec.Meta(gt=1)] = 1.2
    step_log: str | None = None
    strict_fields: bool = False
    dialect: Dialect = Dialect.SGLANG
    transfer_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0

    def __post_init__(self) -> None:
        if len(set(self.to_try)) < len(self.to_try):
            raise ConfigError(f"arms {', '.join(map(str, self.to_try))}: one of them is named twice")
        if self.graph_memory_gb is not None and self.graph_memory_gb <= 0:
            raise ConfigError(f"--graph-memory-gb {self.graph_memory_gb}: must be more than 0. Drop it for no bound")
        if self.graph_memory_gb is not None and self.graph_sharing is GraphSharing.NONE:
            raise ConfigError("--graph-memory-gb beside --graph-sharing none, which captures all: drop one of the two")
        if self.without_drafter and (drafted := [str(arm) for arm in self.to_try if not arm.of_history]):
            raise ConfigError(f"--drafter none beside arms {', '.join(drafted)}: give --arm history, or a drafter")

    @property
    def finds_arms(self) -> bool:
        """Whether it retains of its arms those that can pay."""
        return self.arms == AUTO

    @property
    def to_try(self) -> tuple[Arm, ...]:
        """The arms that it starts with."""
        return (*CANDIDATES, *map(Arm.history, self.auto_history)) if isinstance(self.arms, str) else self.arms

    @property
    def begins_untrained(self) -> bool:
        """Whether the drafter of the start has learnt nothing: no step may draft until another is active."""
        return self.drafter == AUTO and self.speculation

    @property
    def without_drafter(self) -> bool:
        """Whether nothing but history drafts."""
        return self.drafter == NONE and self.speculation

    @property
    def keeps_history(self) -> bool:
        """Whether it remembers responses."""
        return self.speculation and any(arm.of_history for arm in self.to_try)

    @property
    def taps(self) -> bool:
        """Whether anybody is sent features."""
        return self.trainer is not None and self.features.on

    def to_environment(self) -> None:
        """For every process that is started from here on; wakes the seams in this one."""
        os.environ[ENVIRONMENT_VARIABLE] = msgspec.json.encode(self).decode()

    @classmethod
    def from_environment(cls) -> Self:
        """The config of the server that this process belongs to."""
        return msgspec.json.decode(os.environ[ENVIRONMENT_VARIABLE], type=cls)


def read_toml(path: Path, kind: type[T]) -> T:
    """A config file. ConfigError: it is missing, not TOML, or holds an unknown or ill-typed key."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"config file {path}: {error}") from error


def drafter_cache() -> Path:
    """Where drafters are kept that a start or an update made on its way: of the user, by XDG's base directories."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tlt-server" / "drafters"
