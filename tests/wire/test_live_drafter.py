"""A server's drafter for a trainer that has none: fetched whole, checked; and what peers may do to that."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tlt_client.schemas import DrafterVersion

from tests.wire.ends import ANY_PORT, CHUNK, HELLO, MODEL, Asker, End, Hands, Server, step_for, step_until
from tlt_server.wire import live
from tlt_server.wire.files import digests_of
from tlt_server.wire.live import STALLED, Taker
from tlt_server.wire.messages import READS_TO_TRAINER, Chunk, ChunksWanted, Live, LiveFile, LiveWanted, ModelIdentity
from tlt_server.wire.sockets import Link

CONFIG = b'{"architectures": ["x"]}'


class Beginner(End):
    """A trainer that has no drafter."""

    def __init__(self, folder: Path, model: ModelIdentity = MODEL) -> None:
        super().__init__(Link(ANY_PORT, READS_TO_TRAINER))
        self.clock = Hands()
        self.taker = Taker(self.link, model, folder, self.clock)

    def step(self) -> None:
        self.clock.now += 0.002
        self.taker.step(0.002)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Beginner]:
    made = Beginner(tmp_path / "fetched")
    yield made
    made.close()


@pytest.fixture
def server(trainer: Beginner, tmp_path: Path) -> Iterator[Server]:
    made = Server(trainer.link.address, tmp_path / "server")
    yield made
    made.close()


def drafter(folder: Path, seed: int = 0, size: int = 5 * CHUNK + 17) -> tuple[DrafterVersion, bytes]:
    """A folder of one, as version `seed`."""
    folder.mkdir()
    contents = random.Random(seed).randbytes(size)
    (folder / "config.json").write_bytes(CONFIG)
    (folder / "model.safetensors").write_bytes(contents)
    return DrafterVersion(seed, str(folder), None, hashlib.sha256(contents).hexdigest()), contents


def taken(trainer: Beginner, *ends: End) -> tuple[Live, bytes | None]:
    step_until(lambda: trainer.taker.taken, trainer, *ends)
    found = trainer.taker.taken
    assert found is not None
    assert found.server == HELLO.server
    return found.live, found.path and found.path.read_bytes()


def test_the_active_one_arrives(trainer: Beginner, server: Server, tmp_path: Path) -> None:
    start, _ = drafter(tmp_path / "start")
    path = tmp_path / "drafter-7.safetensors"
    _, contents = drafter(tmp_path / "seven", 7, 9 * CHUNK)
    path.write_bytes(contents)
    server.receiver.gives(DrafterVersion(7, str(path), 1, hashlib.sha256(contents).hexdigest()), start)
    found, arrived = taken(trainer, server)
    assert (found.version, found.config, arrived) == (7, CONFIG, contents)  # the config is that of the start
    assert server.is_connected


@given(size=st.integers(1, 4 * CHUNK), chunk=st.integers(1, 2))
@settings(max_examples=10, deadline=None)
def test_of_any_size(tmp_path_factory: pytest.TempPathFactory, size: int, chunk: int) -> None:
    folder = tmp_path_factory.mktemp("sizes")
    trainer = Beginner(folder / "fetched")
    server = Server(trainer.link.address, folder / "server")
    try:
        start, contents = drafter(folder / "start", chunk, size)
        server.receiver.gives(start)
        assert taken(trainer, server)[1] == contents
    finally:
        server.close()
        trainer.close()


@pytest.mark.parametrize("lost", ["gone", "another", "several"])
def test_one_that_cannot_be_given_gives_way_to_that_of_the_start(
    trainer: Beginner, server: Server, tmp_path: Path, lost: str
) -> None:
    (start, contents), (seven, _) = drafter(tmp_path / "start"), drafter(tmp_path / "seven", 7)
    file = tmp_path / "seven" / "model.safetensors"
    match lost:
        case "gone":
            file.unlink()
        case "another":
            file.write_bytes(b"another one")
        case "several":
            file.with_name("more.safetensors").write_bytes(b"more")
    server.receiver.gives(seven, start)
    found, arrived = taken(trainer, server)
    assert (found.version, arrived) == (0, contents)


def test_a_server_that_has_none_to_give_says_why(trainer: Beginner, server: Server, tmp_path: Path) -> None:
    server.receiver.gives(DrafterVersion(3, str(tmp_path / "nowhere"), None, None))
    found, arrived = taken(trainer, server)
    assert arrived is None
    assert "drafter 3" in found.reason
    assert "No such file" in found.reason


def test_a_file_replaced_while_it_is_fetched_arrives_as_it_was(
    trainer: Beginner, server: Server, tmp_path: Path
) -> None:
    start, contents = drafter(tmp_path / "start", size=40 * CHUNK)
    server.receiver.gives(start)
    step_until(lambda: list((tmp_path / "fetched").glob("*.partial")), trainer, server)
    (tmp_path / "start" / "model.safetensors").unlink()
    (tmp_path / "start" / "model.safetensors").write_bytes(b"another")
    assert taken(trainer, server)[1] == contents


def test_what_an_earlier_life_has_fetched_is_gone_on_from(server: Server, trainer: Beginner, tmp_path: Path) -> None:
    start, contents = drafter(tmp_path / "start")
    chunks = [contents[at : at + CHUNK] for at in range(0, len(contents), CHUNK)]
    header = LiveFile(size=len(contents), chunk_bytes=CHUNK, digests=digests_of(chunks))
    (tmp_path / "fetched").mkdir()
    (tmp_path / "fetched" / f"{header.digest.hex()[:16]}.partial").write_bytes(contents[: 3 * CHUNK] + b"damaged")
    server.receiver.gives(start)
    assert taken(trainer, server)[1] == contents


def test_a_server_of_another_target_is_turned_away(tmp_path: Path) -> None:
    trainer = Beginner(tmp_path / "fetched", ModelIdentity("Other", 1, 1))
    server = Server(trainer.link.address, tmp_path / "server")
    try:
        step_for(0.3, trainer, server)
        assert trainer.taker.taken is None
        assert trainer.link.rejected
        assert not server.is_connected
    finally:
        server.close()
        trainer.close()


def asked(trainer: Beginner, asker: Asker) -> None:
    step_until(lambda: asker.take(LiveWanted), trainer, asker)


def test_chunks_that_are_damaged_are_not_taken(trainer: Beginner) -> None:
    asker = Asker(trainer.link.address)
    try:
        asked(trainer, asker)
        header = LiveFile(size=3, chunk_bytes=3, digests=digests_of([b"abc"]))
        asker.say(Live(version=1, file=header))
        step_until(lambda: asker.take(ChunksWanted), trainer, asker)
        asker.say(Chunk(digest=header.digest, index=0), b"abd")
        step_until(lambda: asker.take(ChunksWanted), trainer, asker)  # asked for again
        assert trainer.taker.taken is None
        asker.say(Chunk(digest=header.digest, index=0), b"abc")
        assert taken(trainer, asker)[1] == b"abc"
    finally:
        asker.close()


def test_one_too_large_is_not_fetched(trainer: Beginner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_BYTES", 2)
    asker = Asker(trainer.link.address)
    try:
        asked(trainer, asker)
        asker.say(Live(version=1, file=LiveFile(size=3, chunk_bytes=3, digests=bytes(32))))
        found, arrived = taken(trainer, asker)
        assert arrived is None
        assert "3 bytes" in found.reason
    finally:
        asker.close()


def test_after_a_silence_another_server_is_asked(trainer: Beginner, server: Server, tmp_path: Path) -> None:
    start, contents = drafter(tmp_path / "start")
    server.receiver.gives(start)
    asker = Asker(trainer.link.address)
    try:
        asked(trainer, asker)
        asker.say(Live(version=1, file=LiveFile(size=3, chunk_bytes=3, digests=bytes(32))))
        step_until(lambda: asker.take(ChunksWanted), trainer, asker)
    finally:
        asker.close()
    trainer.clock.now += STALLED
    assert taken(trainer, server)[1] == contents
