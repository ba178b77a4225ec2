"""A server at a glance."""

import msgspec

from tlt_client.schemas.history import History
from tlt_client.schemas.strategy import Arm, Graphs
from tlt_client.schemas.weights import DrafterTrainer, Versions


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


class Load(msgspec.Struct, frozen=True):
    """Requests that a server has, over all replicas."""

    running: int
    waiting: int


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
