"""Every message of the control link, and how one becomes frames. No pickle anywhere.

A message is one frame: the schema version (1 byte), the CRC-32 of the rest (4 bytes, big-endian), and a msgpack map
whose `type` is the message's name. A `DrafterChunk` has a second frame, its raw bytes; its sha256 is in the update.

A `Rejected` begins with a zero instead of a schema version, and has one form for ever: peers of different versions
understand each other's, and as what begins with a zero is never answered, two of them cannot reject in circles.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from tlt_server.errors import ConfigError, WireError

SCHEMA_VERSION = 3
"""Raised when a message changes: a message of another version is rejected whole, never guessed at."""

MAX_CHUNK_BYTES = 4 << 20
MAX_CHUNKS_WANTED = 4
"""Chunks that a receiver may ask for at once."""

Buffer: TypeAlias = bytes | bytearray | memoryview
MAX_NAME, MAX_REASON, MAX_PATH = 256, 2000, 4096
"""Characters."""
MAX_DIGESTS = 4 << 20
"""Bytes of them: 256 GiB in chunks of 2 MiB."""
MAX_DEVICES = 64

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""What JSON's numbers hold exactly, and 64 bits with room to add to."""
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
FilePath = Annotated[str, Meta(max_length=MAX_PATH, pattern=r"^[^\x00]*$")]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]


class ModelIdentity(Struct, frozen=True, forbid_unknown_fields=True):
    """What a drafter must fit: the target's architecture (of its config.json), hidden size and vocabulary."""

    architecture: Name
    hidden_size: Count
    vocab_size: Count

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """What a target's config.json says of it.

        Raises:
            ConfigError: it lacks one of the three, or has it as something else.
        """
        (architecture, *_) = config.get("architectures") or [None]
        said = {"architecture": architecture} | {key: config.get(key) for key in ("hidden_size", "vocab_size")}
        try:
            return msgspec.convert(said, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"config.json of the target: {error}; no drafter can be matched to it") from error

    def __str__(self) -> str:
        return f"{self.architecture} (hidden size {self.hidden_size}, vocabulary {self.vocab_size})"


class Message(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all."""


# -- server -> trainer, by way of its receiver ----------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Server's receiver -> trainer, on connecting and every second after: who it is, and its whole state.

    server: its name, for people. drafter_version: in force; 0 is the one that the server was started with, or none.
    newest_drafter: the highest version that the server has been given; it takes only higher ones.
    shared: where the target's share of a drafter lies, as in `TargetShared`; empty while it does not.
    devices: that it computes on, by `tlt_server.wire.devices.identity`.
    """

    server: Name
    model: ModelIdentity
    target_version: Count
    weight_version: Name
    drafter_version: Count
    newest_drafter: Count
    shared: FilePath = ""
    devices: Annotated[tuple[Name, ...], Meta(max_length=MAX_DEVICES)] = ()


class TargetPublished(Message, frozen=True):
    """Server -> trainer, once for each publication. weight_version: the RL trainer's own name for it."""

    target_version: Count
    weight_version: Name


class TargetShared(Message, frozen=True):
    """Server -> trainer, once for each publication, some time after it: what a drafter shares with this target.

    path: a folder on the server's machine with a safetensors file that holds the embedding and, where it has one, the
        head, under the names that a checkpoint has them; it lies there until the next one does.
    """

    target_version: Count
    path: FilePath


class DrafterSwapped(Message, frozen=True):
    """Server -> trainer: what became of drafter `version`. drafter_version: the one in force from now on."""

    version: Count
    outcome: Literal["live", "refused", "rolled_back"]
    drafter_version: Count
    reason: Reason = ""


class Load(Message, frozen=True):
    """Server -> trainer, a few times a second; one that cannot be sent at once is dropped.

    running, waiting: requests. lent: some memory of its devices was released, for others than a drafter's trainer.
    """

    running: Count
    waiting: Count
    lent: bool = False


class ChunksWanted(Message, frozen=True):
    """Receiver -> sender: credit for the chunks [start, stop) of the update with this digest."""

    digest: Digest
    start: Count
    stop: Count

    def __post_init__(self) -> None:
        if not 0 < self.stop - self.start <= MAX_CHUNKS_WANTED:
            raise ValueError(f"chunks [{self.start}, {self.stop}): ask for 1 to {MAX_CHUNKS_WANTED}")


class DrafterReceived(Message, frozen=True):
    """Receiver -> sender: the update is whole and verified. Not yet in force: `DrafterSwapped` says that."""

    version: Count


class DrafterRefused(Message, frozen=True):
    """Receiver -> sender, and to its own server: this update is not taken, and need not be offered again."""

    version: Count
    reason: Reason


# -- trainer -> server ----------------------------------------------------------------------------------------------


class Heartbeat(Message, frozen=True):
    """Sender -> receiver, in answer to each `Hello`. newest_drafter: the latest version published; 0 is none yet."""

    newest_drafter: Count


class DrafterUpdate(Message, frozen=True):
    """Sender -> receiver: a drafter to fetch, at publication and after a `Hello` until it is received or refused.

    version: of the drafter. trained_on: target version. size: bytes of the whole, which is one safetensors file.
    digests: the sha256 of every chunk, end to end.
    """

    version: Annotated[int, Meta(ge=1, lt=1 << 53)]
    trained_on: Count
    model: ModelIdentity
    size: Annotated[int, Meta(ge=1, lt=1 << 53)]
    chunk_bytes: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]
    digests: Annotated[bytes, Meta(max_length=MAX_DIGESTS)]

    def __post_init__(self) -> None:
        if len(self.digests) != 32 * self.chunks:
            raise ValueError(f"{len(self.digests)} bytes of digests for {self.chunks} chunks")

    @property
    def chunks(self) -> int:
        return -(-self.size // self.chunk_bytes)

    @property
    def digest(self) -> bytes:
        """Names the whole by its contents: the sha256 of the chunks' sha256s."""
        return hashlib.sha256(self.digests).digest()


class DrafterChunk(Message, frozen=True):
    """Sender -> receiver, followed by the chunk's raw bytes: chunk `index` of the update with this digest."""

    digest: Digest
    index: Count


# -- either way -----------------------------------------------------------------------------------------------------


class Rejected(Message, frozen=True):
    """Either -> either: a message of yours could not be read or used, and was dropped."""

    reason: Reason


# -- receiver -> its own server, on a pipe --------------------------------------------------------------------------


class DrafterReady(Message, frozen=True):
    """Receiver -> its server: a drafter lies whole and verified at `path`, until a newer one does."""

    version: Count
    trained_on: Count
    path: FilePath


class TrainerLink(Message, frozen=True):
    """Receiver -> its server, when it changes: does a trainer answer; messages rejected since the start."""

    connected: bool
    rejected: Count


Notice: TypeAlias = TargetPublished | TargetShared | DrafterSwapped | Load
ToTrainer: TypeAlias = Hello | Notice | ChunksWanted | DrafterReceived | DrafterRefused
ToServer: TypeAlias = Heartbeat | DrafterUpdate | DrafterChunk

READS_TO_TRAINER = Decoder(ToTrainer)
READS_TO_SERVER = Decoder(ToServer)
READS_NOTICES = Decoder(Notice)
READS_FROM_RECEIVER = Decoder(DrafterReady | DrafterRefused | TrainerLink)


def short(name: str) -> str:
    """A name that users choose, or a digest of it where no message holds it."""
    return name if len(name) <= MAX_NAME else hashlib.sha256(name.encode(errors="replace")).hexdigest()


def encode(message: Message) -> bytes:
    """The header frame of a message. A reason is cut to what the peer takes."""
    if isinstance(message, Rejected):
        return b"\0" + message.reason[:500].encode(errors="replace")
    if len(getattr(message, "reason", "")) > MAX_REASON:
        message = msgspec.structs.replace(message, reason=message.reason[:MAX_REASON])  # type: ignore[attr-defined]
    return sealed(msgspec.msgpack.encode(message))


def sealed(body: bytes) -> bytes:
    """A header frame of this body."""
    return bytes([SCHEMA_VERSION]) + zlib.crc32(body).to_bytes(4) + body


def opened(header: memoryview, frames: int) -> memoryview:
    """The body of a header frame that came with so many frames.

    Raises:
        WireError: it is damaged, or of another release.
    """
    if len(header) < 5:
        raise WireError(f"a message of {frames} frames, the first of {len(header)} bytes: no header")
    if header[0] != SCHEMA_VERSION:
        raise WireError(f"schema version {header[0]}; this side speaks {SCHEMA_VERSION}: install one release on both")
    if zlib.crc32(header[5:]) != int.from_bytes(header[1:5]):
        raise WireError("checksum of the header is wrong: it was damaged on the way")
    return header[5:]


def decode(frames: Sequence[Buffer], reads: Decoder[Message]) -> tuple[Message, Buffer]:
    """The message that the frames are, and its raw bytes (empty but for a `DrafterChunk`).

    Args:
        frames: as they came, without a ROUTER's identity frame.
        reads: a decoder of the messages that travel this way.

    Raises:
        WireError: they are not such a message.
    """
    header = memoryview(frames[0] if frames else b"")
    if header and header[0] == 0:
        return Rejected(reason=bytes(header[1:501]).decode(errors="replace")), b""
    body = opened(header, len(frames))
    try:
        message = reads.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message that belongs here: {error}") from error
    if len(frames) != 1 + isinstance(message, DrafterChunk):
        raise WireError(f"{type(message).__name__} of {len(frames)} frames")
    return message, frames[1] if len(frames) > 1 else b""
