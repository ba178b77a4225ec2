"""Every message between rollout servers and a drafter trainer. What the Structs allow is all that gets in; no pickle.

The first frame: schema version (1 byte), CRC-32 of what follows (4 bytes, big-endian), msgpack. A `Chunk` has a
second frame, its bytes; a `FeatureHeader` has three more, see `FeatureBatch`. A `Rejected` begins with a zero and has
one form for ever; such a frame is never answered, so that two releases cannot reject in circles.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from tlt_server.errors import ConfigError, WireError

SCHEMA_VERSION = 5
"""Raised when a message changes: one of another version is rejected whole."""
MAX_CHUNKS_WANTED = 4
MAX_CHUNK_BYTES = 4 << 20
"""Of a chunk, and of the digests of all: enough for 256 GiB in chunks of 2 MiB."""
MAX_NAME, MAX_REASON, MAX_DEVICES = 256, 2000, 64
MAX_TOKENS = 1 << 24
"""Of a sequence: what the trainer makes room for must not hang on a number that somebody else has sent."""

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""What JSON's numbers hold exactly, and 64 bits with room to add to."""
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
FilePath = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00]*$")]
SharedName = Literal["model.embed_tokens.weight", "lm_head.weight"]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]


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
    """In answer to each `Hello`."""


class Offer(Message, Blob, frozen=True, tag=True):
    """A drafter to fetch, one safetensors file; offered at its publication, and to each `Hello` that knows another.
    trained_on: target version."""

    version: Annotated[int, Meta(ge=1, lt=1 << 53)]
    trained_on: Count
    model: ModelIdentity

    @property
    def digest(self) -> bytes:
        """Of the whole, its version and contents."""
        return hashlib.sha256(self.version.to_bytes(8) + self.digests).digest()

    def __str__(self) -> str:
        return f"drafter {self.version}"


class SharedWanted(Message, frozen=True):
    """What drafters share with this target, to which the server's path does not lead here."""

    target_version: Count


class Chunk(Message, frozen=True):
    """Either way; followed by the chunk's bytes."""

    digest: Digest
    index: Count


class Rejected(Message, frozen=True):
    """Either way: a message of yours could not be read or used, and was dropped."""

    reason: Reason


READS_TO_TRAINER = Decoder(Hello | ChunksWanted | Shared | Chunk)
READS_TO_SERVER = Decoder(Heartbeat | Offer | Chunk | SharedWanted | ChunksWanted)

# -- server -> trainer, on the features link --------------------------------------------------------------------------


class Rows(Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive tokens [start, start + count) of one request, under one version of the target.

    rid: the request's id, never that of another. group: 64 bits of a hash of the prompt. prompt_tokens: its length.
    partial: the target was being written then, so that it was neither that version nor the one before.
    """

    rid: Name
    group: Annotated[int, Meta(ge=0)]
    prompt_tokens: Annotated[int, Meta(ge=0, lt=MAX_TOKENS)]
    start: Annotated[int, Meta(ge=0, lt=MAX_TOKENS)]
    count: Annotated[int, Meta(ge=1, lt=MAX_TOKENS)]
    target_version: Count
    partial: bool = False

    def __post_init__(self) -> None:
        if self.start + self.count > MAX_TOKENS:
            raise ValueError(f"tokens [{self.start}, {self.start + self.count}) of a sequence of {MAX_TOKENS} at most")


class FeatureHeader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """server: as in its `Hello`. dtype: of all states. width: of a row of what the drafter reads."""

    server: Name
    model: ModelIdentity
    kind: Literal["eagle", "eagle3"]
    dtype: Literal["float32", "bfloat16", "float16"]
    width: Annotated[int, Meta(ge=1, lt=1 << 20)]
    rows: Annotated[tuple[Rows, ...], Meta(min_length=1, max_length=1 << 14)]

    @property
    def tokens(self) -> int:
        return sum(each.count for each in self.rows)


class FeatureBatch(NamedTuple):
    """N tokens, those of one `Rows` after those of the one before; little-endian, row-major.

    tokens: [N] int32. hidden: [N, width], what the drafter reads. finals: [N, hidden size], or empty (EAGLE).
    """

    header: FeatureHeader
    tokens: Buffer
    hidden: Buffer
    finals: Buffer

    def encode(self) -> list[Buffer]:
        return [sealed(msgspec.msgpack.encode(self.header)), *self[1:]]

    @classmethod
    def decode(cls, frames: Sequence[Buffer]) -> "FeatureBatch":
        """Views of the frames. Raises WireError: they are no batch."""
        if len(frames) != 4:
            raise WireError(f"features in {len(frames)} frames; they take 4")
        header = _opened(frames, Decoder(FeatureHeader))
        item, finals = 4 if header.dtype == "float32" else 2, header.model.hidden_size * (header.kind == "eagle3")
        wanted = [header.tokens * size for size in (4, header.width * item, finals * item)]
        if (sizes := [memoryview(frame).nbytes for frame in frames[1:]]) != wanted:
            raise WireError(f"features of {header.tokens} tokens in frames of {sizes} bytes; they take {wanted}")
        return cls(header, *frames[1:])


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
    message = _opened(frames, reads)
    if len(frames) != 1 + isinstance(message, Chunk):
        raise WireError(f"{type(message).__name__} of {len(frames)} frames")
    return message, frames[1] if len(frames) > 1 else b""


def _opened(frames: Sequence[Buffer], reads: Decoder[T]) -> T:
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
