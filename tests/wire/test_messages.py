"""Messages: every one survives the way, and nothing else gets through as one."""

import zlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.ends import HELLO
from tlt_server.errors import ConfigError, WireError
from tlt_server.wire import messages
from tlt_server.wire.messages import (
    READS_TO_SERVER,
    READS_TO_TRAINER,
    SCHEMA_VERSION,
    Chunk,
    ChunksWanted,
    Heartbeat,
    Live,
    LiveFile,
    LiveWanted,
    Message,
    ModelIdentity,
    Offer,
    Rejected,
    Shared,
    SharedFile,
    SharedName,
    SharedWanted,
    Source,
    decode,
    encode,
)

count = st.integers(0, 2**53 - 1)
text = st.text(st.characters(codec="utf-8"), max_size=50)
path = text.map(lambda said: said.replace("\0", "/"))
digest = st.binary(min_size=32, max_size=32)
key = st.binary(max_size=40)
identity = st.builds(ModelIdentity, text, count, count)
pieces = st.integers(1, 4)
MESSAGES: dict[type[Message], st.SearchStrategy[Message]] = {
    messages.Hello: st.builds(
        messages.Hello,
        server=text,
        model=identity,
        target_version=count,
        weight_version=text,
        drafter_version=count,
        newest_drafter=count,
        shared=path,
        settled_drafter=count,
        reason=text,
        offer=st.none() | digest,
        load=st.none() | count,
        lent=st.booleans(),
        door=text,
        devices=st.lists(text, max_size=3).map(tuple),
    ),
    ChunksWanted: st.builds(
        lambda digest, start, n: ChunksWanted(digest=digest, start=start, stop=start + n),
        digest,
        st.integers(0, 2**52),
        pieces,
    ),
    Heartbeat: st.builds(Heartbeat, takers=st.lists(key, max_size=3).map(tuple), wants_times=st.booleans()),
    Offer: st.builds(
        lambda n, rest, chunk_bytes, **other: Offer(
            size=(n - 1) * chunk_bytes + min(rest, chunk_bytes), chunk_bytes=chunk_bytes, digests=bytes(32 * n), **other
        ),
        n=pieces,
        rest=st.integers(1, messages.MAX_CHUNK_BYTES),
        chunk_bytes=st.integers(1, messages.MAX_CHUNK_BYTES),
        version=st.integers(1, 2**53 - 1),
        trained_on=count,
        model=identity,
        source=st.none() | st.builds(Source, text, key, pieces),
    ),
    Chunk: st.builds(Chunk, digest=digest, index=count),
    Rejected: st.builds(Rejected, reason=text),
    SharedWanted: st.builds(SharedWanted, target_version=count),
    Shared: st.builds(
        lambda version, digests: Shared(
            target_version=version,
            files=tuple(
                SharedFile(size=len(each), chunk_bytes=1, digests=b"".join(bytes(32) for _ in each), name=name)
                for name, each in zip(get_args(SharedName), digests, strict=False)
            ),
        ),
        count,
        st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=2),
    ),
    LiveWanted: st.just(LiveWanted()),
    Live: st.builds(
        Live,
        version=count,
        config=st.binary(max_size=50),
        file=st.none() | st.builds(lambda n: LiveFile(size=n, chunk_bytes=1, digests=bytes(32 * n)), pieces),
        reason=text,
    ),
}
any_message = st.one_of(*MESSAGES.values())
READERS = (READS_TO_TRAINER, READS_TO_SERVER)
reader = st.sampled_from(READERS)


def frames_of(message: Message, payload: bytes = b"xyz") -> list[bytes]:
    return [encode(message), payload] if isinstance(message, Chunk) else [encode(message)]


def read_by_any(frames: list[bytes]) -> list[tuple[Message, Any]]:
    """What the readers that know the message make of it."""
    read = []
    for each in READERS:
        try:
            read.append(decode(frames, each))
        except WireError:
            continue
    return read


def test_every_message_is_tried_here() -> None:
    assert set(MESSAGES) == set(Message.__subclasses__())


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type[Message]) -> None:
    @given(message=MESSAGES[kind], payload=st.binary(max_size=50))
    def survives(message: Message, payload: bytes) -> None:
        read = read_by_any(frames_of(message, payload))
        assert read
        for each, raw in read:
            assert each == message
            assert bytes(raw) == (payload if kind is Chunk else b"")

    survives()


@given(st.lists(st.binary(max_size=100), max_size=4), reader)
def test_random_frames(frames: list[bytes], reads: Any) -> None:
    try:
        message, _ = decode(frames, reads)
    except WireError:
        return
    assert isinstance(message, Rejected)
    assert frames[0][0] == 0


@given(any_message, st.data())
def test_a_flipped_bit_in_the_header_is_found(message: Message, data: Any) -> None:
    frames = frames_of(message)
    position = data.draw(st.integers(0, len(frames[0]) * 8 - 1))
    header = bytearray(frames[0])
    header[position // 8] ^= 1 << position % 8
    for read, _ in read_by_any([bytes(header), *frames[1:]]):
        assert isinstance(read, Rejected)


@given(any_message.filter(lambda message: not isinstance(message, Rejected)), st.data())
def test_a_truncated_header_is_found(message: Message, data: Any) -> None:
    frames = frames_of(message)
    end = data.draw(st.integers(0, len(frames[0]) - 1))
    assert not read_by_any([frames[0][:end], *frames[1:]])


def with_checksum(body: bytes) -> bytes:
    return bytes([SCHEMA_VERSION]) + zlib.crc32(body).to_bytes(4) + body


objects = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
)


@given(
    any_message,
    st.text(max_size=12) | st.sampled_from(Message.__struct_fields__ or ["version", "digest"]),
    objects,
    reader,
)
def test_a_wrong_field_under_a_right_checksum(message: Message, name: str, value: Any, reads: Any) -> None:
    """What a faulty peer would send: it is a message with all its constraints kept, or it is refused."""
    fields = msgspec.to_builtins(message) | {name: value}
    try:
        read, _ = decode([with_checksum(msgspec.msgpack.encode(fields)), b""][: 1 + (fields["type"] == "Chunk")], reads)
    except WireError:
        return
    assert msgspec.convert(msgspec.to_builtins(read), type(read)) == read


@given(st.binary(max_size=200), reader)
def test_random_bodies_under_a_right_checksum(body: bytes, reads: Any) -> None:
    with pytest.raises(WireError):
        decode([with_checksum(body)], reads)


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\x81\xa4type" + b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",
        b"\x82\xa4type\xa5Hello\xa7devices\xdd\xff\xff\xff\xff",
        b"\x81\xa4type\xa1\xff",
    ],
    ids=["deep lists", "deep maps", "deep type", "huge map", "huge list", "not UTF-8"],
)
def test_hostile_bodies(body: bytes) -> None:
    for reads in READERS:
        with pytest.raises(WireError):
            decode([with_checksum(body)], reads)


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 17, 255])
def test_another_schema_version_is_named(version: int) -> None:
    frame = bytes([version]) + encode(HELLO)[1:]
    with pytest.raises(WireError, match=f"schema version {version}; this side speaks {SCHEMA_VERSION}"):
        decode([frame], READS_TO_TRAINER)


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(WireError, match="Hello"):
        decode([encode(HELLO)], READS_TO_SERVER)
    with pytest.raises(WireError, match="Heartbeat"):
        decode([encode(Heartbeat())], READS_TO_TRAINER)


@pytest.mark.parametrize(
    ("message", "payloads"),
    [
        (Heartbeat(), 1),
        (Chunk(digest=bytes(32), index=0), 0),
        (Chunk(digest=bytes(32), index=0), 2),
    ],
)
def test_raw_bytes_where_they_belong_only(message: Message, payloads: int) -> None:
    with pytest.raises(WireError, match=f"{type(message).__name__} of {payloads + 1} frames"):
        decode([encode(message), *[b"x"] * payloads], READS_TO_SERVER)


def test_a_rejection_is_read_in_every_version_and_direction() -> None:
    frame = encode(Rejected(reason="too old " * 100))
    assert len(frame) == 501
    for reads in READERS:
        assert decode([frame, b"whatever follows"], reads)[0] == Rejected(reason=("too old " * 100)[:500])
    assert decode([b"\0\xff\xfe"], READS_TO_SERVER)[0] == Rejected(reason="\ufffd\ufffd")


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 2), (0, messages.MAX_CHUNKS_WANTED + 1)])
def test_credit_is_bounded(start: int, stop: int) -> None:
    body = {"type": "ChunksWanted", "digest": bytes(32), "start": start, "stop": stop}
    with pytest.raises(WireError, match="ask for 1 to"):
        decode([with_checksum(msgspec.msgpack.encode(body))], READS_TO_TRAINER)


@pytest.mark.parametrize(
    "fields",
    [
        {"digests": bytes(64)},
        {"digests": b""},
        {"size": 0},
        {"version": 0},
        {"chunk_bytes": 0},
        {"chunk_bytes": messages.MAX_CHUNK_BYTES + 1},
        {"model": {}},
    ],
)
def test_an_update_that_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    body = {
        "type": "Offer",
        "version": 1,
        "trained_on": 0,
        "model": {"architecture": "a", "hidden_size": 1, "vocab_size": 1},
        "size": 10,
        "chunk_bytes": 10,
        "digests": bytes(32),
    }
    assert decode([with_checksum(msgspec.msgpack.encode(body))], READS_TO_SERVER)
    with pytest.raises(WireError):
        decode([with_checksum(msgspec.msgpack.encode(body | fields))], READS_TO_SERVER)


def test_a_target_is_known_by_its_config() -> None:
    config = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "vocab_size": 512, "tie_word_embeddings": True}
    assert ModelIdentity.of(config) == ModelIdentity("Qwen2ForCausalLM", 64, 512)
    for wrong in ({"hidden_size": None}, {"vocab_size": "many"}, {"architectures": []}, {"architectures": None}):
        with pytest.raises(ConfigError, match=r"config\.json of the target: .*no drafter can be matched to it"):
            ModelIdentity.of(config | wrong)
