"""A receiver and a sender that is at fault, or a line that is: damaged, lost, doubled, outdated, too large."""

import shutil
from collections.abc import Callable

import msgspec
import pytest
from tlt_client import DrafterUpdate

from tests.wire.ends import (
    MODEL,
    Hands,
    NewServer,
    Script,
    Server,
    drafter,
    holds,
    outgoing,
    step_for,
    step_until,
)
from tlt_server.wire.files import ASK_AGAIN, MAX_DAMAGED, WINDOW
from tlt_server.wire.messages import (
    Chunk,
    ChunksWanted,
    Heartbeat,
    Hello,
    encode,
)
from tlt_server.wire.server import SILENCE
from tlt_server.wire.trainer import Outgoing


@pytest.fixture
def server(script: Script, new_server: NewServer, hands: Hands) -> Server:
    """A server with a clock that the test moves, which has said hello to the script."""
    made = new_server(script, clock=hands)
    step_until(lambda: script.take(Hello), script, made)
    return made


def wanted(script: Script, server: Server) -> ChunksWanted:
    """What the server asks for next."""
    asked: list[ChunksWanted] = []
    step_until(lambda: asked.extend(script.take(ChunksWanted)) or asked, script, server)
    assert len(asked) == 1
    return asked[0]


def refusals(script: Script) -> list[str]:
    """What the server's last hellos say against drafters."""
    return [hello.reason.partition(": ")[2] for hello in script.take(Hello)]


def send(script: Script, update: Outgoing, *indices: int) -> None:
    for index in indices:
        script.say(Chunk(digest=update.digest, index=index), update.chunks[index])


def serve(script: Script, server: Server, update: Outgoing, first: ChunksWanted | None = None) -> None:
    """Sends all that is asked for, until the drafter is there."""
    if first is not None:
        send(script, update, *range(first.start, first.stop))
    while not server.drafters():
        step_for(0.004, script, server)
        for ask in script.take(ChunksWanted):
            send(script, update, *range(ask.start, ask.stop))
    assert holds(server.said(DrafterUpdate)[-1].path, drafter(0))


def test_credit_is_half_a_window_at_a_time(script: Script, server: Server) -> None:
    script.say((update := outgoing()).header)
    ask = wanted(script, server)
    assert (ask.digest, ask.start, ask.stop) == (update.digest, 0, WINDOW)
    send(script, update, 0)
    step_for(0.05, script, server)
    assert not script.take(ChunksWanted)
    send(script, update, 1)
    ask = wanted(script, server)
    assert (ask.start, ask.stop) == (WINDOW, WINDOW + WINDOW // 2)
    send(script, update, *range(2, WINDOW))
    serve(script, server, update, ask)


@pytest.mark.parametrize(
    "spoil",
    [lambda c: c[:-1], lambda c: bytes([c[0] ^ 16]) + c[1:], lambda c: b""],
    ids=["truncated", "flipped bit", "empty"],
)
def test_a_damaged_chunk_is_told_and_asked_for_again(
    script: Script, server: Server, spoil: Callable[[bytes], bytes]
) -> None:
    script.say((update := outgoing()).header)
    wanted(script, server)
    send(script, update, 0)
    script.say(Chunk(digest=update.digest, index=1), spoil(bytes(update.chunks[1])))
    send(script, update, 2, 3)  # already under way
    ask = wanted(script, server)
    assert (ask.start, ask.stop) == (1, 1 + WINDOW)
    assert server.link.rejected.total() == 1
    serve(script, server, update, ask)
    assert server.is_connected


def test_a_chunk_damaged_again_and_again_is_given_up(script: Script, server: Server) -> None:
    script.say((update := outgoing()).header)
    for _ in range(MAX_DAMAGED):
        wanted(script, server)
        script.say(Chunk(digest=update.digest, index=0), b"wrong")
    refusal = "chunk 0 of drafter 1 was damaged: its sha256 is wrong, 3 times"
    step_until(lambda: refusal in refusals(script), script, server)
    assert server.refusals() == [refusal]
    assert server.files() == []


def test_damage_now_and_then_is_lived_with(script: Script, server: Server) -> None:
    script.say((update := outgoing()).header)
    for index in range(WINDOW // 2):
        for _ in range(MAX_DAMAGED - 1):
            wanted(script, server)
            script.say(Chunk(digest=update.digest, index=index), b"wrong")
        send(script, update, index)
    serve(script, server, update, wanted(script, server))
    assert server.link.rejected.total() == WINDOW // 2 * (MAX_DAMAGED - 1)


def test_a_damaged_header_is_rejected_and_the_next_one_taken(
    script: Script, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = outgoing().header
    with monkeypatch.context() as patched:
        patched.setattr("tlt_server.wire.sockets.encode", lambda message: encode(message)[:-1] + b"?")
        script.say(header)
    step_until(server.link.rejected.total, script, server)
    script.say(header)
    wanted(script, server)


def test_lost_chunks_are_asked_for_again(script: Script, server: Server, hands: Hands) -> None:
    script.say((update := outgoing()).header)
    wanted(script, server)
    send(script, update, 0, 3)  # 1 and 2 are lost
    step_for(0.05, script, server)
    assert not script.take(ChunksWanted)
    hands.now += ASK_AGAIN
    ask = wanted(script, server)
    assert (ask.start, ask.stop) == (1, 1 + WINDOW)
    serve(script, server, update, ask)
    assert server.link.rejected.total() == 0


def test_a_silent_trainer_is_not_asked_again_and_again(script: Script, server: Server, hands: Hands) -> None:
    script.say((update := outgoing()).header)
    first = wanted(script, server)
    for _ in range(30):
        hands.now += ASK_AGAIN
        step_for(0.004, script, server)
    assert len(script.take(ChunksWanted)) < SILENCE / ASK_AGAIN
    script.say(Heartbeat())
    assert wanted(script, server) == first
    serve(script, server, update, first)


def test_doubled_and_unasked_chunks_do_no_harm(script: Script, server: Server) -> None:
    old, update = outgoing(9, version=1), outgoing(0, version=2)
    send(script, old, 0, 1)
    script.say(old.header)
    wanted(script, server)
    script.say(update.header)
    ask = wanted(script, server)
    send(script, old, 0, 1)
    send(script, update, 0, 0, 0, 1, 0, 1)
    step_for(0.05, script, server)
    serve(script, server, update, ask)
    send(script, update, 0, 9)
    step_for(0.05, script, server)
    assert server.drafters() == [2]
    assert server.link.rejected.total() == 0


def test_an_offer_repeated_in_mid_transfer_changes_nothing(script: Script, server: Server) -> None:
    script.say((update := outgoing()).header)
    first = wanted(script, server)
    script.say(update.header)
    step_for(0.05, script, server)
    assert not script.take(ChunksWanted)
    serve(script, server, update, first)


def test_an_older_offer_in_mid_transfer_is_refused(script: Script, server: Server) -> None:
    script.say((update := outgoing(version=8)).header)
    first = wanted(script, server)
    script.say(outgoing(5, version=7).header)
    step_until(lambda: "version 7 is older than 8, which is arriving" in refusals(script), script, server)
    serve(script, server, update, first)


def test_the_same_version_with_other_contents_replaces_one_under_way(script: Script, server: Server) -> None:
    script.say(outgoing(9).header)
    wanted(script, server)
    script.say((update := outgoing(0)).header)
    serve(script, server, update, wanted(script, server))
    assert server.files() == ["drafter-1.safetensors"]


def test_a_drafter_for_another_model_is_refused(script: Script, server: Server) -> None:
    script.say(msgspec.structs.replace(outgoing().header, model=msgspec.structs.replace(MODEL, hidden_size=128)))
    step_until(server.refusals, script, server)
    assert "hidden size 128" in server.refusals()[0]
    assert server.files() == []


def test_an_offer_that_was_refused_is_passed_over_when_it_is_repeated(script: Script, server: Server) -> None:
    offer = msgspec.structs.replace(outgoing().header, model=msgspec.structs.replace(MODEL, hidden_size=128))
    script.say(offer)
    refused: list[Hello] = []
    step_until(lambda: refused.extend(script.take(Hello)) or refused, script, server)
    assert [(hello.offer, hello.settled_drafter) for hello in refused] == [(offer.digest, 1)]
    script.say(offer)
    step_for(0.05, script, server)
    assert not script.take(Hello)


def test_one_that_does_not_fit_is_refused_before_it_is_fetched(script: Script, server: Server) -> None:
    chunks = shutil.disk_usage(server.folder).free // (4 << 20) + 1000
    script.say(
        msgspec.structs.replace(
            outgoing().header, size=chunks * (4 << 20), chunk_bytes=4 << 20, digests=bytes(32 * chunks)
        )
    )
    step_until(server.refusals, script, server)
    assert "are missing: make room" in server.refusals()[0]
    assert not script.take(ChunksWanted)
    assert server.files() == []
    script.say((update := outgoing(version=2)).header)
    serve(script, server, update, wanted(script, server))


def test_a_folder_that_cannot_be_written_is_refused_and_mended(script: Script, server: Server) -> None:
    server.folder.rmdir()
    script.say(outgoing().header)
    step_until(server.refusals, script, server)
    assert "No such file or directory" in server.refusals()[0]
    server.folder.mkdir()
    script.say((update := outgoing(version=2)).header)
    serve(script, server, update, wanted(script, server))


def test_one_larger_than_the_server_takes_is_refused_before_it_is_fetched(
    script: Script, new_server: NewServer
) -> None:
    server = new_server(script, most=20_000)
    step_until(lambda: script.take(Hello), script, server)
    script.say(outgoing(chunks=40).header)
    step_until(server.refusals, script, server)
    assert "of this server's drafter 20000 at most" in server.refusals()[0]
    assert not script.take(ChunksWanted)
    script.say((update := outgoing(version=2)).header)
    serve(script, server, update, wanted(script, server))
