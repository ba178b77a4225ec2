"""Links: who may connect, what is dropped, and that nothing a peer sends does harm."""

import asyncio
import logging
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.wire.ends import ANY_PORT, HELLO, Open, heard, say
from tlt_server.wire.messages import (
    MAX_CHUNK_BYTES,
    READS_TO_SERVER,
    READS_TO_TRAINER,
    Chunk,
    Heartbeat,
    Message,
    Rejected,
    decode,
    encode,
)
from tlt_server.wire.sockets import HIGH_WATER_MARK, TRAINER, Link


@pytest.fixture(params=["ipc", "tcp"])
def both(request: pytest.FixtureRequest, opened: Open) -> Iterator[tuple[Link, Link, bytes]]:
    """Trainer's and server's link, and the name by which the trainer knows the server."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = opened(ANY_PORT if request.param == "tcp" else f"ipc://{folder}/s", READS_TO_TRAINER)
        server = opened(trainer.address, READS_TO_SERVER, "host:1")
        say(server, HELLO)
        arrived = heard(trainer)
        assert arrived is not None
        assert arrived[1] == HELLO
        yield trainer, server, arrived[0]


def test_there_and_back(both: tuple[Link, Link, bytes]) -> None:
    trainer, server, peer = both
    assert peer.startswith(b"host:1/")
    assert trainer.send(Chunk(digest=bytes(32), index=3), memoryview(b"raw" * 100_000), to=peer)
    arrived = heard(server)
    assert arrived is not None
    assert arrived[:2] == (TRAINER, Chunk(digest=bytes(32), index=3))
    assert bytes(arrived[2]) == b"raw" * 100_000


def test_an_event_loop_waits_for_what_arrives(both: tuple[Link, Link, bytes]) -> None:
    trainer, server, peer = both

    async def waits() -> float:
        began = time.monotonic()
        await server.arrival(0.1)
        quiet = time.monotonic() - began
        assert trainer.send(Heartbeat(), to=peer)
        await server.arrival(10)
        return quiet

    began = time.monotonic()
    assert asyncio.run(waits()) >= 0.09
    assert time.monotonic() - began < 5
    assert server.receive() == (TRAINER, Heartbeat(), b"")


# -- what cannot be read --------------------------------------------------------------------------------------------


@pytest.fixture
def raw() -> Iterator[Any]:
    """A raw DEALER, for frames that no Link would send."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        yield socket


def test_what_cannot_be_read_is_counted_logged_once_and_told(
    opened: Open, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = opened(ANY_PORT, READS_TO_TRAINER)
    raw.routing_id = b"odd"
    raw.connect(trainer.address)
    sent = [
        [b""],
        [b"\x07abcdefg"],
        [encode(Heartbeat())],
        [encode(HELLO)[:-1]],
        [encode(HELLO), b"more"],
    ]
    with caplog.at_level(logging.WARNING):
        for count, frames in enumerate(sent, 1):
            raw.send_multipart(frames)
            while trainer.rejected.total() < count:
                assert heard(trainer, tries=1) is None
    assert trainer.rejected == {b"odd": len(sent)}
    assert len(caplog.records) == 1
    assert "b'odd'" in caplog.text
    for _ in sent:
        assert raw.poll(2000)
        assert isinstance(decode(raw.recv_multipart(), READS_TO_SERVER)[0], Rejected)
    raw.send(encode(HELLO))
    arrived = heard(trainer)
    assert arrived is not None
    assert arrived[1] == HELLO


def test_a_rejection_is_logged_and_never_answered(opened: Open, raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = opened(ANY_PORT, READS_TO_TRAINER)
    raw.connect(trainer.address)
    for _ in range(3):
        raw.send(b"\0speak version 2")
    while not caplog.records:
        assert heard(trainer, tries=1) is None
    assert heard(trainer, tries=3) is None
    assert trainer.rejected.total() == 0
    assert not raw.poll(100)
    (record,) = caplog.records  # it begins with the peer's name, which are bytes of any kind, spaces too
    assert record.getMessage().endswith(" rejects what we send: 'speak version 2'")


@pytest.mark.slow
def test_two_versions_do_not_reject_in_circles(both: tuple[Link, Link, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, server, _ = both
    with monkeypatch.context() as patched:
        patched.setattr("tlt_server.wire.messages.SCHEMA_VERSION", 9)
        say(server, HELLO)
    for _ in range(5):
        assert heard(trainer, tries=1) is None
        assert heard(server, tries=1) is None
    assert (trainer.rejected.total(), server.rejected.total()) == (1, 0)


anything = st.lists(st.binary(max_size=60), min_size=1, max_size=4)
mutated = st.builds(
    lambda message, cut, end: [encode(message)[:cut] + end],
    st.sampled_from([HELLO, Heartbeat()]),
    st.integers(0, 60),
    st.binary(max_size=5),
)


@pytest.mark.parametrize("binds", [True, False], ids=["trainer", "server"])
def test_fuzzed_sockets_live_on(binds: bool) -> None:
    """Frames, random and mutated: each is a message, a rejection, or counted; then a good one gets through."""
    with zmq.Context() as context, context.socket(zmq.DEALER if binds else zmq.ROUTER) as raw:
        raw.linger = 0
        link = Link(ANY_PORT, READS_TO_TRAINER)
        if not binds:
            link.close()
            port = raw.bind_to_random_port("tcp://127.0.0.1")
            link = Link(f"tcp://127.0.0.1:{port}", READS_TO_SERVER, "host")
            say(link, HELLO)
            to = [raw.recv_multipart()[0]]
        else:
            raw.connect(link.address)
            to = []
        last: Message = HELLO if binds else Heartbeat()

        @settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
        @given(st.lists(anything | mutated, min_size=1, max_size=5))
        def feed(messages: list[list[bytes]]) -> None:
            for frames in messages:
                raw.send_multipart([*to, *frames])
            raw.send_multipart([*to, encode(last)])
            before = link.rejected.total()
            for _ in range(len(messages) + 1):
                link.wait(5)
                arrived = link.receive()
            assert arrived is not None
            assert arrived[1] == last
            told = 0
            while raw.poll(0 if told >= link.rejected.total() - before else 1000):
                told += bool(raw.recv_multipart())
            assert told == link.rejected.total() - before

        feed()
        assert link.rejected.total() > 100
        link.close()


def test_a_giant_frame_costs_its_sender_the_connection(opened: Open, raw: Any) -> None:
    trainer = opened(ANY_PORT, READS_TO_TRAINER)
    raw.connect(trainer.address)
    raw.send(b"x" * (3 * MAX_CHUNK_BYTES))
    assert heard(trainer, tries=3) is None
    assert trainer.rejected.total() == 0  # it never came this far
    server = opened(trainer.address, READS_TO_SERVER, "host")
    say(server, HELLO)
    assert heard(trainer) is not None


# -- sending --------------------------------------------------------------------------------------------------------


def test_sending_to_nobody_says_so(opened: Open) -> None:
    trainer = opened(ANY_PORT, READS_TO_TRAINER)
    assert not trainer.send(Heartbeat(), to=b"nobody")
    server = opened("tcp://127.0.0.1:1", READS_TO_SERVER, "host")
    assert not server.send(HELLO)


def test_a_peer_that_does_not_read_is_held_little_for(opened: Open, raw: Any) -> None:
    trainer = opened(ANY_PORT, READS_TO_TRAINER)
    raw.rcvhwm = 1
    raw.routing_id = b"slow"
    raw.connect(trainer.address)
    raw.send(encode(HELLO))
    assert heard(trainer) is not None
    chunk = bytes(MAX_CHUNK_BYTES)
    sent = sum(trainer.send(Chunk(digest=bytes(32), index=i), chunk, to=b"slow") for i in range(100))
    assert HIGH_WATER_MARK <= sent < 2 * HIGH_WATER_MARK  # the mark, and what the kernel took
