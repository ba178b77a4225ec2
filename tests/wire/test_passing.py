"""Drafters from server to server: few fetch from the trainer; all have the latest, whatever becomes of a source."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.auth

from tests.wire.ends import (
    ANY_PORT,
    CHUNK,
    HELLO,
    Clock,
    End,
    Giver,
    Hands,
    NewServer,
    NewTrainer,
    Open,
    Script,
    Server,
    Trainer,
    drafter,
    holds,
    outgoing,
    say,
    step_for,
    step_until,
)
from tlt_server.wire.messages import (
    READS_TO_TAKER,
    Chunk,
    ChunksWanted,
    Heartbeat,
    Hello,
    Source,
)
from tlt_server.wire.passing import PATIENCE, TAKERS
from tlt_server.wire.sockets import TRAINER, CurveKeys, Link
from tlt_server.wire.trainer import Outgoing

CHUNKS = 60


def named(number: int) -> Hello:
    return msgspec.structs.replace(HELLO, server=f"host{number}:30000")


def counted(trainer: Trainer) -> Counter[bytes]:
    """The chunks that leave it from now on, by who gets them."""
    sent, send = Counter[bytes](), trainer.link.send

    def counting(message: Any, payload: Any = None, to: bytes = b"") -> bool:
        sent[to] += isinstance(message, Chunk)
        return send(message, payload, to)

    trainer.link.send = counting  # type: ignore[method-assign]
    return sent


@pytest.fixture
def grown(
    new_trainer: NewTrainer, new_server: NewServer, hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Trainer, list[Server]]]:
    """A trainer and so many servers, which have opened their doors to one another. Time stands still for them, unless
    `clock` is another, and a chunk of 1 KiB is as good as a large one, so that none gives another up for its pace."""
    monkeypatch.setattr("tlt_server.wire.passing.SLOWEST", CHUNK)

    def make(
        count: int,
        address: str = ANY_PORT,
        clock: Clock = hands,
        curve: CurveKeys | None = None,
        curves: Sequence[CurveKeys | None] = (None,) * 9,
    ) -> tuple[Trainer, list[Server]]:
        trainer = new_trainer(address, clock=clock, curve=curve, pays=0)
        servers = [new_server(trainer, hello=named(n), clock=clock, curve=curves[n]) for n in range(count)]
        members = trainer.sender._tree.members

        def are_open() -> bool:
            hands.now += 0.02  # they say hello every second
            return sum(bool(each.door) for each in members.values()) == count

        step_until(are_open, trainer, *servers)
        return trainer, servers

    return make


Grown = Callable[..., tuple[Trainer, list[Server]]]


def all_have(servers: list[Server], version: int, chunks: int = CHUNKS) -> None:
    for each in servers:
        assert each.files().count(f"drafter-{version}.safetensors") == 1
        assert holds(each.folder / f"drafter-{version}.safetensors", drafter(version, chunks))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_two_fetch_from_the_trainer_and_the_others_from_them(grown: Grown, tmp_path: Path, scheme: str) -> None:
    trainer, servers = grown(7, ANY_PORT if scheme == "tcp" else f"ipc://{tmp_path}/control")
    assert {each.door.partition(":")[0] for each in trainer.sender._tree.members.values()} == {scheme}
    sent = counted(trainer)
    for version in (1, 2):
        trainer.publish(version, 0, drafter(version, CHUNKS))
        step_until(lambda version=version: all(version in each.drafters() for each in servers), trainer, *servers)  # type: ignore[misc]
        all_have(servers, version)
    assert sorted(sent.values())[-2:] == [2 * (CHUNKS + 1)] * 2
    assert sent.total() == 4 * (CHUNKS + 1)
    assert not any(each.link.rejected for each in servers)
    for each in servers:
        each.close()
        assert not each.files()


def test_with_two_servers_no_door_is_opened(new_trainer: NewTrainer, new_server: NewServer) -> None:
    trainer = new_trainer(pays=0)
    servers = [new_server(trainer, hello=named(number)) for number in range(2)]
    threads = threading.active_count()
    trainer.publish(1, 0, drafter(1))
    step_until(lambda: all(each.drafters() for each in servers), trainer, *servers)
    step_until(lambda: len(trainer.said()) >= 5, trainer, *servers)
    assert {hello.door for hello in trainer.said()} == {""}
    assert threading.active_count() == threads


def test_without_a_fan_out_all_fetch_from_the_trainer(new_trainer: NewTrainer, new_server: NewServer) -> None:
    trainer = new_trainer(pays=0, fan_out=0)
    servers = [new_server(trainer, hello=named(number)) for number in range(4)]
    step_until(lambda: len(trainer.sender._tree.members) == 4, trainer, *servers)
    sent = counted(trainer)
    trainer.publish(1, 0, drafter(1))
    step_until(lambda: all(each.drafters() for each in servers), trainer, *servers)
    assert set(sent.values()) == {11}
    assert {hello.door for hello in trainer.said()} == {""}


def test_a_chunk_is_passed_on_before_the_next_is_here(script: Script, new_server: NewServer, opened: Open) -> None:
    server = new_server(script)
    taker, update = with_door(script, server, opened), outgoing()
    script.say(update.header)
    say(taker, ChunksWanted(digest=update.digest, start=0, stop=4))
    for index in range(4):
        script.say(Chunk(digest=update.digest, index=index), update.chunks[index])
        assert taken(taker, script, server) == [(index, bytes(update.chunks[index]))]
    step_for(0.05, script, server)
    assert taker.receive() is None


@pytest.mark.slow
def test_a_newer_one_replaces_one_on_its_way_down(grown: Grown) -> None:
    trainer, servers = grown(6)
    trainer.publish(1, 0, drafter(1, 400))
    step_until(lambda: any(servers[-1].folder.glob("*.partial")), trainer, *servers)
    trainer.publish(2, 0, drafter(2, CHUNKS))
    step_until(lambda: all(each.drafters() for each in servers), trainer, *servers)
    step_for(0.1, trainer, *servers)
    assert {tuple(each.drafters()) for each in servers} == {(2,)}
    all_have(servers, 2)
    assert not trainer.sender._tree._doubted


@pytest.mark.slow
def test_who_comes_late_fetches_from_a_server(grown: Grown, new_server: NewServer, hands: Hands) -> None:
    trainer, servers = grown(4)
    trainer.publish(1, 0, drafter(1, CHUNKS))
    step_until(lambda: all(each.drafters() for each in servers), trainer, *servers)
    sent = counted(trainer)
    late = new_server(trainer, hello=named(9), clock=hands)
    step_until(late.drafters, trainer, late, *servers)
    all_have([late], 1)
    assert sent.total() == 0


@pytest.mark.slow
def test_who_starts_anew_in_the_middle_goes_on(grown: Grown, new_server: NewServer) -> None:
    trainer, servers = grown(5, clock=time.monotonic)
    trainer.publish(1, 0, drafter(1, 200))
    step_until(lambda: any(servers[4].folder.glob("*.partial")), trainer, *servers)
    gone = servers.pop(0)  # two fetch from it
    gone.close()
    again = new_server(trainer, hello=named(0), folder=gone.folder)
    servers.append(again)
    step_until(lambda: all(each.drafters() for each in servers), trainer, *servers)
    all_have(servers, 1, 200)


@pytest.mark.slow
def test_a_trainer_that_starts_anew_offers_the_same_again(grown: Grown, new_trainer: NewTrainer) -> None:
    trainer, servers = grown(5, clock=time.monotonic)
    trainer.publish(1, 0, drafter(1, 200))
    step_until(lambda: any(servers[4].folder.glob("*.partial")), trainer, *servers)
    address = trainer.link.address
    trainer.close()
    again = new_trainer(address, pays=0)
    again.publish(1, 0, drafter(1, 200))
    step_until(lambda: all(each.drafters() for each in servers), again, *servers)
    all_have(servers, 1, 200)


# -- a source at fault ------------------------------------------------------------


@pytest.fixture
def giver(keep: Callable[[End], None]) -> Giver:
    keep(end := Giver())
    return end


@pytest.fixture
def server(script: Script, new_server: NewServer, hands: Hands) -> Server:
    made = new_server(script, clock=hands)
    step_until(lambda: script.take(Hello), script, made)
    return made


def offer(script: Script, door: str, level: int = 1, key: bytes = b"") -> Outgoing:
    """Of a drafter that is to be fetched there."""
    update = outgoing()
    script.say(msgspec.structs.replace(update.header, source=Source(door, key, level)))
    return update


def from_trainer(script: Script, server: Server, update: Outgoing, first: int) -> None:
    """The server asks the trainer for what is missing, chunk `first` before all others, and gets it."""

    def serve() -> bool:
        for each in script.take(ChunksWanted):
            assert each.start >= first
            for index in range(each.start, each.stop):
                script.say(Chunk(digest=each.digest, index=index), update.chunks[index])
        return bool(server.drafters())

    step_until(serve, script, server)
    assert holds(server.folder / "drafter-1.safetensors", drafter(0))
    assert not server.refusals()


def test_what_a_source_sends_is_taken(script: Script, giver: Giver, server: Server) -> None:
    update = offer(script, giver.link.address)
    while not server.drafters():
        step_for(0.01, giver, script, server)
        for each in giver.take(ChunksWanted):
            for index in range(each.start, each.stop):
                giver.say(Chunk(digest=each.digest, index=index), update.chunks[index])
    assert holds(server.folder / "drafter-1.safetensors", drafter(0))
    assert not script.take(ChunksWanted)
    assert giver.link.address not in {link.address for link in server.receiver._peers.links}


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("spoil", [lambda c: c[:-1], lambda c: bytes([c[0] ^ 16]) + c[1:], lambda c: b""])
def test_a_source_that_lies_is_left(
    script: Script, giver: Giver, server: Server, first: int, spoil: Callable[[bytes], bytes]
) -> None:
    update = offer(script, giver.link.address)
    step_until(lambda: giver.take(ChunksWanted), giver, script, server)
    for index in range(first):
        giver.say(Chunk(digest=update.digest, index=index), update.chunks[index])
    giver.say(Chunk(digest=update.digest, index=first), spoil(bytes(update.chunks[first])))
    from_trainer(script, server, update, first)
    assert server.receiver._incoming is None


def test_a_source_that_is_silent_is_left_after_a_while(
    script: Script, giver: Giver, server: Server, hands: Hands
) -> None:
    update = offer(script, giver.link.address, level=3)
    for _ in range(5):
        step_until(lambda: giver.take(ChunksWanted), giver, script, server)
        hands.now += 1.0
        script.say(Heartbeat())
    step_for(0.1, giver, script, server)
    assert not script.take(ChunksWanted)
    hands.now += 1.0
    script.say(Heartbeat())
    from_trainer(script, server, update, 0)


def test_a_source_that_says_other_things_is_silent(script: Script, giver: Giver, server: Server, hands: Hands) -> None:
    update = offer(script, giver.link.address)
    step_until(lambda: giver.take(ChunksWanted), giver, script, server)
    for index in (1, 2, 9, 2**40):
        giver.say(Chunk(digest=update.digest, index=index), update.chunks[1])
    giver.say(Chunk(digest=bytes(32), index=0), update.chunks[0])
    giver.say(Heartbeat())
    giver.say(msgspec.structs.replace(update.header, version=99))
    step_for(0.2, giver, script, server)
    assert not script.take(ChunksWanted)
    hands.now += PATIENCE
    script.say(Heartbeat())
    from_trainer(script, server, update, 0)
    assert server.drafters() == [1]


def test_a_source_that_trickles_is_left(script: Script, giver: Giver, server: Server, hands: Hands) -> None:
    update = offer(script, giver.link.address)
    step_until(lambda: giver.take(ChunksWanted), giver, script, server)
    for index in range(4):
        giver.say(Chunk(digest=update.digest, index=index), update.chunks[index])
        step_until(lambda index=index: server.receiver._incoming.next == index + 1, giver, script, server)  # type: ignore[misc,union-attr]
        hands.now += 0.6
        script.say(Heartbeat())
    assert not script.take(ChunksWanted)
    hands.now += 0.6
    from_trainer(script, server, update, 4)


def test_a_source_that_is_gone_is_left_at_once(script: Script, giver: Giver, server: Server, hands: Hands) -> None:
    update = offer(script, giver.link.address, level=50)
    step_until(lambda: giver.take(ChunksWanted), giver, script, server)
    giver.say(Chunk(digest=update.digest, index=0), update.chunks[0])
    step_until(lambda: server.receiver._incoming.next == 1, giver, script, server)  # type: ignore[union-attr]
    giver.close()
    began = hands.now

    def is_left() -> bool:
        hands.now += 0.05
        script.say(Heartbeat())
        return not server.receiver._peers.has_source

    step_until(is_left, script, server)
    assert hands.now - began < PATIENCE * 25  # of a patience of twice that
    from_trainer(script, server, update, 1)


@pytest.mark.parametrize(
    "door", ["tcp://127.0.0.1:1", "ipc:///no/such/door", "tcp://10.255.255.1:1", "nowhere", "tcp://127.0.0.1:*"]
)
def test_a_door_that_is_none(script: Script, server: Server, hands: Hands, door: str) -> None:
    update = offer(script, door, level=5)
    step_for(0.1, script, server)
    hands.now += PATIENCE
    script.say(Heartbeat())
    from_trainer(script, server, update, 0)


def test_a_trainer_that_is_away_is_not_needed(script: Script, giver: Giver, server: Server, hands: Hands) -> None:
    update = offer(script, giver.link.address, level=3)
    step_until(lambda: giver.take(ChunksWanted), giver, script, server)
    script.close()
    hands.now += 3.5
    step_until(lambda: not server.is_connected, server)
    while not server.drafters():
        for each in giver.take(ChunksWanted):
            for index in range(each.start, each.stop):
                giver.say(Chunk(digest=each.digest, index=index), update.chunks[index])
        step_for(0.01, giver, server)


# -- who fetches at fault ------------------------------------------------------------


def with_door(script: Script, server: Server, opened: Open, name: str = "taker") -> Link:
    """The server's door is opened; a link to it."""
    step_until(lambda: script.peer != TRAINER, script, server)
    script.say(Heartbeat(takers=(b"",)))
    step_until(lambda: server.receiver.hello.door, script, server)
    return opened(server.receiver.hello.door, READS_TO_TAKER, name)


def taken(taker: Link, *ends: End) -> list[tuple[int, bytes]]:
    """The next chunk that arrives."""
    found: list[tuple[int, bytes]] = []

    def one() -> bool:
        if (arrived := taker.receive()) is not None:
            assert isinstance(arrived[1], Chunk)
            found.append((arrived[1].index, bytes(arrived[2])))
        return bool(found)

    step_until(one, *ends)
    return found


def test_what_is_not_there_is_not_given(script: Script, server: Server, opened: Open) -> None:
    taker, update = with_door(script, server, opened), outgoing()
    script.say(update.header)
    for index in range(3):
        script.say(Chunk(digest=update.digest, index=index), update.chunks[index])
    for wanted in (
        ChunksWanted(digest=update.digest, start=2**40, stop=2**40 + 4),
        ChunksWanted(digest=bytes(32), start=0, stop=4),
        ChunksWanted(digest=update.digest, start=2, stop=3),
    ):
        say(taker, wanted)
    assert taken(taker, script, server) == [(2, bytes(update.chunks[2]))]
    step_for(0.1, script, server)
    assert taker.receive() is None


def test_asks_that_follow_one_another_are_one_and_bounded(script: Script, server: Server, opened: Open) -> None:
    taker, update = with_door(script, server, opened), outgoing(chunks=40)
    script.say(update.header)
    for start in range(0, 40, 4):
        say(taker, ChunksWanted(digest=update.digest, start=start, stop=start + 4))
    step_for(0.1, script, server)
    assert list(server.receiver._peers._door._asked.values()) == [(update.digest, 36, 40)]  # type: ignore[union-attr]


@pytest.mark.slow
def test_many_that_ask_and_do_not_read_take_little(script: Script, server: Server, opened: Open) -> None:
    first, update = with_door(script, server, opened), outgoing()
    script.say(update.header)
    takers = [first, *(opened(server.receiver.hello.door, READS_TO_TAKER, f"{number}") for number in range(40))]
    for each in takers:
        each.send(ChunksWanted(digest=bytes(32), start=0, stop=4))
    step_for(0.5, script, server)
    assert len(server.receiver._peers._door._asked) <= TAKERS.connections  # type: ignore[union-attr]


def test_a_drafter_that_is_taken_away_is_passed_on_no_more(script: Script, server: Server, opened: Open) -> None:
    taker, update = with_door(script, server, opened), outgoing()
    script.say(update.header)
    step_until(lambda: any(server.folder.glob("*.partial")), script, server)
    script.say(Chunk(digest=update.digest, index=0), update.chunks[0])
    step_until(lambda: server.receiver._incoming.next == 1, script, server)  # type: ignore[union-attr]
    server.receiver._incoming.path.unlink()  # type: ignore[union-attr]
    say(taker, ChunksWanted(digest=update.digest, start=0, stop=1))
    step_for(0.1, script, server)
    assert taker.receive() is None
    assert server.is_connected


# -- CURVE ------------------------------------------------------------------------------------------------------------


class Keys:
    """Certificates of a trainer, of servers that it knows, and of a stranger."""

    def __init__(self, folder: Path, *servers: str) -> None:
        self.folder, self.known = folder, folder / "known"
        self.known.mkdir(parents=True)
        for name in ("trainer", "stranger", *servers):
            public, secret = zmq.auth.create_certificates(folder, name)
            Path(secret).chmod(0o600)
            if name in servers:
                Path(public).rename(self.known / f"{name}.key")
        self.trainer = CurveKeys(folder / "trainer.key_secret", self.known)

    def of(self, name: str) -> CurveKeys:
        return CurveKeys(self.folder / f"{name}.key_secret", self.folder / "trainer.key")

    def public(self, name: str) -> bytes:
        return zmq.auth.load_certificate(self.folder / f"{name}.key_secret")[0]


NAMES = ("one", "two", "three", "four", "five")


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["a key each", "one key for all"])
def test_curve(tmp_path: Path, grown: Grown, opened: Open, shared: bool) -> None:
    keys = Keys(tmp_path / "keys", *NAMES)
    curves = [keys.of(NAMES[0] if shared else name) for name in NAMES]
    trainer, servers = grown(5, curve=keys.trainer, curves=curves)
    members = trainer.sender._tree.members
    assert {each.key for each in members.values()} == {keys.public(name) for name in NAMES[: 1 if shared else 5]}
    sent = counted(trainer)
    trainer.publish(1, 0, drafter(1, CHUNKS))
    step_until(lambda: all(each.drafters() for each in servers), trainer, *servers)
    all_have(servers, 1)
    assert sent.total() == 2 * (CHUNKS + 1)
    door, key = servers[0].receiver.hello.door, keys.public(NAMES[0])
    wanted = ChunksWanted(digest=outgoing(1, chunks=CHUNKS).digest, start=0, stop=1)
    for curve in (None, CurveKeys(keys.folder / "stranger.key_secret", key), keys.of(NAMES[1])):
        other = opened(door, READS_TO_TAKER, "other", curve)  # without a key, with a wrong one, to the wrong one
        other.send(wanted)
        step_for(0.3, *servers)
        assert not other.send(wanted) or other.receive() is None
    known = opened(door, READS_TO_TAKER, "known", keys.of(NAMES[not shared])._replace(peers=key))
    step_until(lambda: known.send(wanted), *servers)
    assert taken(known, *servers) == [(0, drafter(1)[:1024])]


def test_a_source_with_another_key_is_left(
    tmp_path: Path, new_server: NewServer, keep: Callable[[End], None], hands: Hands
) -> None:
    keys = Keys(tmp_path / "keys", "one", "two")
    keep(script := Script(keys.trainer))
    server = new_server(script, curve=keys.of("one"), clock=hands)
    other = new_server(script, curve=keys.of("two"), hello=named(2))
    step_until(lambda: script.take(Hello), script, server)
    taker = script.peer
    step_until(lambda: script.peer != taker, script, other)
    script.say(Heartbeat(takers=(keys.public("one"),)))
    step_until(lambda: other.receiver.hello.door, script, other)
    script.peer = taker
    update = offer(script, other.receiver.hello.door, key=keys.public("stranger"))
    step_for(0.2, server, other)
    hands.now += PATIENCE
    script.say(Heartbeat())
    from_trainer(script, server, update, 0)


@pytest.mark.slow
def test_who_is_no_server_of_the_trainer_any_more_is_let_in_no_more(
    tmp_path: Path, new_server: NewServer, keep: Callable[[End], None], opened: Open
) -> None:
    keys = Keys(tmp_path / "keys", "one", "two")
    keep(script := Script(keys.trainer))
    server = new_server(script, curve=keys.of("one"))
    step_until(lambda: script.take(Hello), script, server)
    script.say(Heartbeat(takers=(keys.public("two"),)))
    step_until(lambda: server.receiver.hello.door, script, server)
    curve = CurveKeys(keys.folder / "two.key_secret", keys.public("one"))
    wanted = ChunksWanted(digest=bytes(32), start=0, stop=1)
    before = opened(server.receiver.hello.door, READS_TO_TAKER, "two", curve)
    step_until(lambda: before.send(wanted), server)
    script.say(Heartbeat())
    step_for(0.1, script, server)
    after = opened(server.receiver.hello.door, READS_TO_TAKER, "two again", curve)
    step_for(0.5, server)
    assert not after.send(wanted)
    assert server.receiver.hello.door
