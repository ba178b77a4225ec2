"""Connections to an end that binds: what each may take of it is bounded, and a good one is served all the while."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from benchmarks.lib.safety.hostile import FRAME, greet
from tests.wire.ends import ANY_PORT, HELLO, heard, say
from tlt_server.wire.connections import Bounds
from tlt_server.wire.messages import MAX_CHUNK_BYTES, READS_TO_SERVER, READS_TO_TRAINER, encode
from tlt_server.wire.sockets import MAX_PEERS_COUNTED, Link

BOUNDS = Bounds(connections=8, waiting=1 << 20, in_all=2 << 20, prove_within=1.0)


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link(ANY_PORT, READS_TO_TRAINER, bounds=BOUNDS)
    yield made
    made.close()


def port_of(link: Link) -> int:
    return int(link.address.rpartition(":")[2])


def connection(link: Link) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(link)), timeout=5)


def is_served(link: Link) -> bool:
    server = Link(link.address, READS_TO_SERVER, HELLO.server)
    try:
        say(server, HELLO)
        arrived = heard(link)
        return arrived is not None and arrived[1] == HELLO
    finally:
        server.close()


def is_cut(line: socket.socket, seconds: float = 10) -> bool:
    line.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        while line.recv(4096):
            pass
    return True


@pytest.mark.slow
def test_a_message_without_end_is_cut(link: Link) -> None:
    with connection(link) as line:
        greet(line)
        sent = 0
        with contextlib.suppress(ConnectionError, TimeoutError):  # reset, or not read any more
            while sent < 10_000:
                line.sendall(FRAME)
                sent += 1
        assert sent < 10_000
        assert link.cut == 1
    assert is_served(link)


def test_a_message_whose_connection_libzmq_does_not_know_is_taken(link: Link) -> None:
    assert link._door is not None
    link._door.took([zmq.Frame(b"of no connection")], proves=True)
    assert is_served(link)


def test_the_thread_ends_with_its_socket() -> None:
    before = threading.active_count()
    link = Link(ANY_PORT, READS_TO_TRAINER)
    assert threading.active_count() > before
    link.close()
    assert threading.active_count() == before


@pytest.mark.slow
def test_one_that_says_nothing_is_cut_in_time(link: Link) -> None:
    with connection(link) as silent, connection(link) as greets:
        greet(greets)
        assert is_cut(silent)
        assert is_cut(greets)
    assert is_served(link)


@pytest.mark.slow
def test_one_that_sends_what_cannot_be_read_proves_nothing(link: Link) -> None:
    with connection(link) as line:
        greet(line)
        line.sendall(b"\x00\x03abc")
        until = time.monotonic() + 5
        while not link.rejected and time.monotonic() < until:
            link.wait(0.05)
            assert link.receive() is None
        assert link.rejected
        assert is_cut(line)


def test_a_flood_of_connections_makes_room_for_a_good_one(link: Link) -> None:
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(connection(link)) for _ in range(3 * BOUNDS.connections)]
        assert is_served(link)
        assert sum(is_cut(line) for line in lines[: BOUNDS.connections]) == BOUNDS.connections


@pytest.mark.slow
def test_one_that_has_proved_itself_stays(link: Link) -> None:
    server = Link(link.address, READS_TO_SERVER, HELLO.server)
    try:
        say(server, HELLO)
        arrived = heard(link)
        assert arrived is not None
        time.sleep(2 * BOUNDS.prove_within)
        with contextlib.ExitStack() as stack:
            for _ in range(3 * BOUNDS.connections):
                stack.enter_context(connection(link))
            time.sleep(0.3)
            say(server, HELLO)
            again = heard(link)
        assert again is not None
        assert again[0] == arrived[0]
    finally:
        server.close()


def test_what_is_counted_by_peer_does_not_grow_without_end(link: Link) -> None:
    for number in range(2 * MAX_PEERS_COUNTED):
        link.reject(b"%d" % number, "no")
    assert len(link.rejected) == MAX_PEERS_COUNTED + 1
    assert link.rejected.total() == 2 * MAX_PEERS_COUNTED
    assert is_served(link)


@pytest.mark.slow
def test_a_word_that_is_too_long_is_not_taken(link: Link) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.connect(link.address)
        raw.send(encode(HELLO) + bytes(MAX_CHUNK_BYTES + (1 << 20)))
        assert heard(link, tries=5) is None
    assert link.rejected.total() == 0
    assert is_served(link)
