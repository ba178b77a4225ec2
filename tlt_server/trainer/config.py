"""The settings of `tlt-server train`, checked once, at the door; nothing below reads argv or a file of settings."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from tlt_server.config import DrafterKind, beside, read_toml
from tlt_server.errors import ConfigError
from tlt_server.preflight import is_loopback
from tlt_server.trainer.learn.loop import Settings
from tlt_server.trainer.learn.losses import TokenLoss
from tlt_server.trainer.publish.gate import Policy
from tlt_server.wire.sockets import CurveKeys
from tlt_server.wire.tree import FAN_OUT

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Logbook = Literal["tensorboard", "wandb"]
Port = Annotated[int, Meta(ge=0, lt=1 << 16)]


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a drafter is judged. every: training steps. depth: drafts of a chain. entries: judged by, at most.
    temperature: of the rollouts."""

    every: Count = 50
    depth: Count = 3
    entries: Count = 8192
    temperature: Annotated[float, Meta(gt=0)] = 1.0


class SpotSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Training while rollouts leave a GPU free (spot.py); `on = false`: always, on GPUs of the trainer's own.

    Which GPUs servers compute on, and how much they have to do, they say themselves; one where no server is known to
    be is the trainer's own. settle_s: without load until training starts. silence_s: without a report until a server
    may be busy for all we know. within_s: after load has come back, for training to stop and to give its memory back;
    a trainer that has not by then ends. at_least: of several GPUs, so many must be free for training to start.
    slowdown: share by which it may slow the decode steps of servers down whose GPUs do not drain; it keeps its memory
    there. 0: it does not train there.
    """

    on: bool = False
    settle_s: Annotated[float, Meta(ge=0)] = 2.0
    silence_s: Annotated[float, Meta(gt=0)] = 5.0
    within_s: Annotated[float, Meta(gt=0)] = 10.0
    at_least: Count = 1
    slowdown: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        if self.slowdown and not self.on:
            raise ValueError(
                f"slowdown = {self.slowdown:g} wants on = true: without it training never waits for rollouts"
            )


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `tlt-server train` is told.

    target: folder or hub name of the model whose drafter is trained. Its sizes count; embedding and head come from the
        servers, whose target may be another by then.
    folder: for checkpoints and published drafters; what is found there is gone on from.
    drafter: folder to begin with; None: that of the first server (begin.py), unless a kind is given.
    drafter_kind: of one to make that has learnt nothing; None: EAGLE, where the server's cannot be trained.
    listen: control link, `tcp://HOST:PORT` or `ipc://PATH`.
    features: link of features; None: the port after the control link's, or its path with `.features` after it.
    key: file of this side's CURVE certificate, the secret one; None: no encryption, so on this machine only.
    server_keys: folder of the public ones of servers that may connect.
    fan_out: servers that fetch a drafter from the trainer, and from each server that passes it on, where there are so
        many that this pays (wire/tree.py); 0: all fetch it from the trainer.
    host, port: of the status and the metrics, over HTTP; 0: the system chooses.
    logbooks: TensorBoard, W&B (logbooks.py), in the folder; of extras by their names.
    insecure: they may be read, and steps asked for, from other machines, which `host` lets in; without a key.
    loss: preset; None: the kind's own. token_loss: of it (learn/losses.py). likeliest: weight of the cross entropy over
        the target's ten likeliest tokens. chain: steps of a chain in training; none need be deeper than an arm. Of the
        latter two None: the preset's own.
    entries: of a pack, and of a training step: a pair of a state and the token after it.
    passes: how often a token is learnt from, on average, before training waits for more.
    on_demand: it trains, judges and publishes when it is asked for steps by POST /tlt/v1/train/steps, and only then.
    buffer_mb: of features, in memory.
    max_age: target versions that a feature may be behind the newest.
    held_out: share of prompts that are kept to judge by; of each target's at least one, if it sees two.
    checkpoint_every: training steps.
    keep: checkpoints.
    spot: training while rollouts leave a GPU free.
    device: torch's name; None: a GPU if there is one. Under torchrun `cuda` or `cpu`, each process having its own GPU.
    memory_gb: of each GPU, at most; None: no limit. For a trainer that shares one with a server.
    threads: of torch on the CPU; None: one fewer than torch would take. The scheduler of a server on this machine polls
        on a core, and threads that wait for one that shares it make a step several times as long.
    """

    target: str
    folder: str
    drafter: str | None = None
    drafter_kind: DrafterKind | None = None
    listen: str = "tcp://127.0.0.1:30500"
    features: str | None = None
    key: str | None = None
    server_keys: str | None = None
    fan_out: Annotated[int, Meta(ge=0, le=16)] = FAN_OUT
    host: str = "127.0.0.1"
    port: Port = 30502
    logbooks: tuple[Logbook, ...] = ()
    insecure: bool = False
    loss: Literal["eagle", "hass", "eagle3"] | None = None
    token_loss: TokenLoss = "cross_entropy"
    likeliest: Annotated[float, Meta(ge=0)] | None = None
    chain: Annotated[int, Meta(ge=1, le=16)] | None = None
    optimizer: Settings = Settings()
    entries: Annotated[int, Meta(ge=16)] = 4096
    passes: Annotated[float, Meta(gt=0)] = 10.0
    on_demand: bool = False
    buffer_mb: Count = 4096
    max_age: Annotated[int, Meta(ge=0)] = 1
    held_out: Share = 0.05
    gate: Gate = Gate()
    policy: Policy = Policy()
    checkpoint_every: Count = 200
    keep: Count = 3
    spot: SpotSettings = SpotSettings()
    device: str | None = None
    memory_gb: Annotated[float, Meta(gt=0)] | None = None
    threads: Count | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.key is None) != (self.server_keys is None):
            raise ConfigError("key and server_keys belong together, give both or neither")
        if not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} lets other machines read the status: take 127.0.0.1, or insecure = true"
            )

    @property
    def features_address(self) -> str:
        """Where features arrive."""
        return self.features or beside(self.listen)

    @property
    def curve(self) -> CurveKeys | None:
        """Of both links."""
        return CurveKeys(Path(self.key), Path(self.server_keys)) if self.key and self.server_keys else None

    @classmethod
    def read(cls, path: Path | None, flags: dict[str, Any], defaults: dict[str, Any]) -> Self:
        """The file's settings, before `defaults`; those of `flags` that are not None before them. Raises ConfigError:
        the file is missing or not TOML; a setting is missing, unknown, ill-typed or out of range."""
        said = read_toml(path, dict[str, Any]) if path else {}
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            return msgspec.convert(defaults | said | given, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"settings of the trainer: {error}") from error
