"""Every message between rollout servers and a drafter trainer. What the Structs allow is all that gets in; no pickle.

The first frame: schema version (1 byte), CRC-32 of what follows (4 bytes, big-endian), msgpack. A `Chunk` has a
second frame, its bytes; for features see features.py. A `Rejected` begins with a zero and has
one form for ever; such a frame is never answered, so that two releases cannot reject in circles.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from tlt_server.errors import ConfigError, WireError

SCHEMA_VERSION = 8
"""Raised when a message changes: one of another version is rejected whole."""
MAX_CHUNKS_WANTED = 4
MAX_CHUNK_BYTES = 4 << 20
"""Of a chunk, and of the digests of all: enough for 256 GiB in chunks of 2 MiB."""
MAX_NAME, MAX_REASON, MAX_DEVICES, MAX_CONFIG, MAX_TAKERS = 256, 2000, 64, 32 << 10, 1024

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""What JSON's numbers hold exactly, and 64 bits with room to add to."""
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
FilePath = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00]*$")]
SharedName = Literal["model.embed_tokens.weight", "lm_head.weight"]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Key = Annotated[bytes, Meta(max_length=40)]
"""A public one of CURVE's, in Z85; empty where nothing is encrypted."""


class ModelIdentity(Struct, frozen=True, forbid_unknown_fields=True):
    """What a drafter must fit."""

    architecture: Name
    hidden_size: Count
    vocab_size: Count

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By a target's config.json. Raises ConfigError: it lacks one of the three, or has it as something else."""
        (architecture, *_) = config.get("architectures") or [None]
        said = {"architecture": architecture} | {key: config.get(key) for key in ("hidden_size", "vocab_size")}
        try:
            return msgspec.convert(said, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"config.json of the target: {error}; no drafter can be matched to it") from error

    def __str__(self) -> str:
        return f"{self.architecture} (hidden size {self.hidden_size}, vocabulary {self.vocab_size})"


class Message(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """On the control link."""


class Blob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file, fetched in chunks. size: bytes. digests: the sha256 of every chunk, end to end."""

    size: Annotated[int, Meta(ge=1, lt=1 << 53)]
    chunk_bytes: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]
    digests: Annotated[bytes, Meta(max_length=MAX_CHUNK_BYTES)]

    def __post_init__(self) -> None:
        if len(self.digests) != 32 * self.chunks:
            raise ValueError(f"{len(self.digests)} bytes of digests for {self.chunks} chunks")

    @property
    def chunks(self) -> int:
        return -(-self.size // self.chunk_bytes)


# -- server -> trainer ------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """On connecting, on every change and every second: the server's whole state.

    weight_version: the RL trainer's own name for the target.
    shared: a folder on the server's machine, of safetensors files with the target's embedding and, where there is one,
        the head, under a checkpoint's names; empty: none yet. It lies there until the next one does.
    drafter_version: active; 0 is the one that the server was started with.
    newest_drafter: the highest version that it was given; it takes only higher ones.
    settled_drafter: the highest of which it is known what became: active, refused, or rolled back.
    reason: why the last one was refused or rolled back.
    offer: digest of the last offer that it took up or refused. It need not be made again; None: any may be made, also
        the one that it gave up before its trainer was away.
    devices: `wire.devices.identity`.
    load: requests running and waiting, counted just now; None: not counted.
    lent: memory of its devices was released.
    decoded_s, usual_s: the client's `StepTimes`, at some time in the last second; 0: no trainer wants them.
    door: where other servers may fetch drafters from it; empty: nowhere.
    """

    server: Name
    model: ModelIdentity
    target_version: Count
    weight_version: Name
    drafter_version: Count
    newest_drafter: Count
    shared: FilePath = ""
    settled_drafter: Count = 0
    reason: Reason = ""
    offer: Digest | None = None
    devices: Annotated[tuple[Name, ...], Meta(max_length=MAX_DEVICES)] = ()
    load: Count | None = None
    lent: bool = False
    door: Name = ""
    decoded_s: Seconds = 0.0
    usual_s: Seconds = 0.0


class SharedFile(Blob, frozen=True):
    """name: of the tensor in it."""

    name: SharedName

    @property
    def digest(self) -> bytes:
        """Of its name and contents."""
        return hashlib.sha256(self.name.encode() + self.digests).digest()

    def __str__(self) -> str:
        return f"the target's {self.name}"


class Shared(Message, frozen=True):
    """In answer to `SharedWanted`: what lies in `Hello.shared`, of this target."""

    target_version: Count
    files: Annotated[tuple[SharedFile, ...], Meta(min_length=1, max_length=2)]


class LiveFile(Blob, frozen=True):
    """The safetensors file of an active drafter."""

    @property
    def digest(self) -> bytes:
        """Of it as such: of nothing else that holds the same."""
        return hashlib.sha256(b"live" + self.digests).digest()

    def __str__(self) -> str:
        return "the server's drafter"


class Live(Message, frozen=True):
    """In answer to `LiveWanted`. version: of the active drafter. config: its config.json. file: None where it cannot be
    given, for the `reason`."""

    version: Count
    config: Annotated[bytes, Meta(max_length=MAX_CONFIG)] = b""
    file: LiveFile | None = None
    reason: Reason = ""


class ChunksWanted(Message, frozen=True):
    """Either way: chunks [start, stop) of the file with this digest."""

    digest: Digest
    start: Count
    stop: Count

    def __post_init__(self) -> None:
        if not 0 < self.stop - self.start <= MAX_CHUNKS_WANTED:
            raise ValueError(f"chunks [{self.start}, {self.stop}): ask for 1 to {MAX_CHUNKS_WANTED}")


# -- trainer -> server ------------------------------------------------------------------------------------------------


class Heartbeat(Message, frozen=True):
    """In answer to each `Hello`. takers: keys of those that may fetch drafters from this server; none: nobody does.
    wants_times: training on one of its devices goes by its step times."""

    takers: Annotated[tuple[Key, ...], Meta(max_length=MAX_TAKERS)] = ()
    wants_times: bool = False


class Source(Struct, frozen=True, forbid_unknown_fields=True):
    """A server to fetch from. level: servers that a chunk passes on its way here."""

    door: Name
    key: Key
    level: Annotated[int, Meta(ge=1, le=MAX_TAKERS)]


class Offer(Message, Blob, frozen=True, tag=True):
    """A drafter to fetch, one safetensors file; offered at its publication, and to each `Hello` that knows another.
    trained_on: target version. source: where it is best fetched from; None, or if that fails: the trainer."""

    version: Annotated[int, Meta(ge=1, lt=1 << 53)]
    trained_on: Count
    model: ModelIdentity
    source: Source | None = None

    @property
    def digest(self) -> bytes:
        """Of the whole, its version and contents."""
        return hashlib.sha256(self.version.to_bytes(8) + self.digests).digest()

    def __str__(self) -> str:
        return f"drafter {self.version}"


class SharedWanted(Message, frozen=True):
    """What drafters share with this target, to which the server's path does not lead here."""

    target_version: Count


class LiveWanted(Message, frozen=True):
    """The active drafter, for a trainer that has none to begin with."""


class Chunk(Message, frozen=True):
    """Either way; followed by the chunk's bytes."""

    digest: Digest
    index: Count


class Rejected(Message, frozen=True):
    """Either way: a message of yours could not be read or used, and was dropped."""

    reason: Reason


READS_TO_TRAINER = Decoder(Hello | ChunksWanted | Shared | Live | Chunk)
READS_TO_SERVER = Decoder(Heartbeat | Offer | Chunk | SharedWanted | LiveWanted | ChunksWanted)
READS_TO_DOOR: Decoder[Message] = Decoder(ChunksWanted)
READS_TO_TAKER: Decoder[Message] = Decoder(Chunk)

# -- frames -----------------------------------------------------------------------------------------------------------


def short(name: str) -> str:
    """A name that users choose, or a digest of it where no message holds it."""
    return name if len(name) <= MAX_NAME else hashlib.sha256(name.encode(errors="replace")).hexdigest()


def encode(message: Message) -> bytes:
    """The first frame."""
    if isinstance(message, Rejected):
        return b"\0" + message.reason[:500].encode(errors="replace")
    return sealed(msgspec.msgpack.encode(message))


def sealed(body: bytes) -> bytes:
    return bytes([SCHEMA_VERSION]) + zlib.crc32(body).to_bytes(4) + body


def decode(frames: Sequence[Buffer], reads: Decoder[Message]) -> tuple[Message, Buffer]:
    """The message, and its raw bytes (empty but for a `Chunk`). Raises WireError: it is none for `reads`."""
    if frames and bytes(frames[0][:1]) == b"\0":
        return Rejected(reason=bytes(frames[0][1:501]).decode(errors="replace")), b""
    message = opened(frames, reads)
    if len(frames) != 1 + isinstance(message, Chunk):
        raise WireError(f"{type(message).__name__} of {len(frames)} frames")
    return message, frames[1] if len(frames) > 1 else b""


def opened(frames: Sequence[Buffer], reads: Decoder[T]) -> T:
    frame = memoryview(frames[0] if frames else b"")
    if len(frame) < 5:
        raise WireError(f"a message of {len(frames)} frames, the first of {len(frame)} bytes: no header")
    if frame[0] != SCHEMA_VERSION:
        raise WireError(f"schema version {frame[0]}; this side speaks {SCHEMA_VERSION}: install one release on both")
    if zlib.crc32(frame[5:]) != int.from_bytes(frame[1:5]):
        raise WireError("checksum of the header is wrong: it was damaged on the way")
    try:
        return reads.decode(frame[5:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message that belongs here: {error}") from error
