"""Files of a target that lie on another machine: fetched whole, checked, once; and what peers may do to that."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.wire.ends import CHUNK, Asker, Server, Trainer, step_for, step_until
from tlt_server.wire.files import digests_of
from tlt_server.wire.messages import Chunk, ChunksWanted, Shared, SharedFile, SharedWanted
from tlt_server.wire.sharing import Fetcher, Source

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MOST = 1 << 20


class Place:
    """Where a trainer's fetched files arrive. took: targets and what their folders held."""

    def __init__(self, folder: Path) -> None:
        self.took: list[tuple[int, dict[str, bytes]]] = []
        self.folders: list[Path] = []
        self.fetcher = Fetcher(folder, MOST, self._done)

    def _done(self, target: int, folder: Path) -> None:
        self.folders.append(folder)
        self.took.append((target, {path.name: path.read_bytes() for path in folder.iterdir()}))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "arrived")


@pytest.fixture
def trainer(place: Place) -> Iterator[Trainer]:
    made = Trainer()
    made.sender.fetcher = place.fetcher
    yield made
    made.close()


@pytest.fixture
def server(trainer: Trainer, tmp_path: Path) -> Iterator[Server]:
    made = Server(trainer.link.address, tmp_path / "server")
    yield made
    made.close()


def write(folder: Path, **tensors: bytes) -> Path:
    folder.mkdir()
    for name, contents in tensors.items():
        (folder / f"{name}.safetensors").write_bytes(contents)
    return folder


def contents(seed: int, size: int = 7777) -> bytes:
    return random.Random(seed).randbytes(size)


def follows(trainer: Trainer, server: Server) -> bytes:
    step_until(lambda: trainer.heard, trainer, server)
    return trainer.heard[-1][0].encode()


def test_what_is_there_arrives(trainer: Trainer, server: Server, place: Place, tmp_path: Path) -> None:
    peer = follows(trainer, server)
    folder = write(tmp_path / "shared", **{EMBEDDING: contents(1), HEAD: contents(2, 3 * CHUNK)})
    server.change(target_version=4, shared=str(folder))
    place.fetcher.want(Source(9, peer, 4))
    step_until(lambda: place.took, trainer, server)
    assert place.took == [(9, {f"{EMBEDDING}.safetensors": contents(1), f"{HEAD}.safetensors": contents(2, 3 * CHUNK)})]
    assert trainer.sender.dropped == 0


@pytest.mark.slow
def test_only_what_changed_is_fetched_again(trainer: Trainer, server: Server, place: Place, tmp_path: Path) -> None:
    peer = follows(trainer, server)
    asked: list[int] = []
    for version, head in enumerate((contents(2), contents(3), contents(3))):
        folder = write(tmp_path / f"shared-{version}", **{EMBEDDING: contents(1), HEAD: head})
        server.change(target_version=version, shared=str(folder))
        place.fetcher.want(Source(version, peer, version))
        count = server.link.read
        step_until(lambda version=version: len(place.took) > version, trainer, server)  # type: ignore[misc]
        asked.append(server.link.read - count)  # messages of the trainer: for two files, for one, and for none
        assert place.took[version] == (version, {f"{EMBEDDING}.safetensors": contents(1), f"{HEAD}.safetensors": head})
    assert asked[0] > asked[1] > asked[2]
    assert [each.exists() for each in place.folders] == [False, False, True]
    assert len(list(place.folders[-1].parent.glob("*.whole"))) == 2


@pytest.mark.slow
def test_a_target_that_moved_on_is_let_go(trainer: Trainer, server: Server, place: Place, tmp_path: Path) -> None:
    peer = follows(trainer, server)
    folder = write(tmp_path / "shared", **{EMBEDDING: contents(1, 50 * CHUNK)})
    server.change(target_version=1, shared=str(folder))
    place.fetcher.want(Source(1, peer, 1))
    step_until(lambda: list((tmp_path / "arrived").glob("*.partial")), trainer, server)
    server.change(target_version=2, shared="")
    step_for(0.3, trainer, server)
    assert server.receiver._sharer._files == []
    second = write(tmp_path / "second", **{EMBEDDING: contents(5)})
    server.change(shared=str(second))
    place.fetcher.want(Source(2, peer, 2))
    step_until(lambda: place.took, trainer, server)
    assert place.took == [(2, {f"{EMBEDDING}.safetensors": contents(5)})]


@pytest.mark.slow
def test_another_server_takes_over_from_one_that_is_gone(
    trainer: Trainer, server: Server, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt_server.wire.sharing.STALLED", 0.2)
    peer = follows(trainer, server)
    place.fetcher.want(Source(1, b"gone/1", 7))
    step_for(0.4, trainer, server)
    folder = write(tmp_path / "shared", **{EMBEDDING: contents(1)})
    server.change(target_version=1, shared=str(folder))
    place.fetcher.want(Source(1, peer, 1))
    step_until(lambda: place.took, trainer, server)


@pytest.mark.slow
def test_files_that_are_gone_are_asked_for_in_vain(
    trainer: Trainer, server: Server, place: Place, tmp_path: Path
) -> None:
    peer = follows(trainer, server)
    server.change(target_version=1, shared=str(tmp_path / "nowhere"))
    place.fetcher.want(Source(1, peer, 1))
    step_for(0.5, trainer, server)
    assert not place.took
    assert trainer.heard[-1][1].target_version == 1


@pytest.fixture
def asked(place: Place) -> Iterator[tuple[Asker, Trainer]]:
    """A trainer that wants target 3 of a peer that the test speaks for."""
    trainer = Trainer()
    trainer.sender.fetcher = place.fetcher
    peer = Asker(trainer.link.address)
    step_until(lambda: trainer.heard, trainer, peer)
    place.fetcher.want(Source(3, trainer.heard[-1][0].encode(), 1))
    step_until(lambda: peer.take(SharedWanted), trainer, peer)
    yield peer, trainer
    peer.close()
    trainer.close()


def header(data: bytes, name: str = EMBEDDING, **changes: object) -> SharedFile:
    chunks = [data[first : first + CHUNK] for first in range(0, len(data), CHUNK)]
    fields = {"name": name, "size": len(data), "chunk_bytes": CHUNK, "digests": digests_of(chunks)} | changes
    return SharedFile(**fields)  # type: ignore[arg-type]


@pytest.mark.slow
def test_chunks_that_lie_are_not_written(asked: tuple[Asker, Trainer], place: Place, tmp_path: Path) -> None:
    peer, trainer = asked
    file = header(contents(1))
    peer.say(Shared(target_version=1, files=(file,)))
    for _ in range(5):
        step_for(0.1, trainer, peer)
        for wanted in peer.take(ChunksWanted):
            for index in range(wanted.start, wanted.stop):
                peer.say(Chunk(digest=wanted.digest, index=index), bytes(CHUNK))
    step_for(0.2, trainer, peer)
    assert not place.took
    assert all(path.stat().st_size == 0 for path in (tmp_path / "arrived").glob("*.partial"))


@pytest.mark.parametrize(
    "answer",
    [
        lambda: Shared(target_version=2, files=(header(contents(1)),)),
        lambda: Shared(target_version=1, files=(header(bytes(MOST + 1)),)),
        lambda: Chunk(digest=bytes(32), index=0),
    ],
    ids=["of another target", "too large", "that was not asked for"],
)
def test_answers_that_do_not_fit_change_nothing(
    asked: tuple[Asker, Trainer], place: Place, tmp_path: Path, answer: Callable[[], Shared | Chunk]
) -> None:
    peer, trainer = asked
    message = answer()
    peer.say(message, b"x" if isinstance(message, Chunk) else None)
    step_for(0.3, trainer, peer)
    assert not place.took
    assert not peer.take(ChunksWanted)
    assert not list((tmp_path / "arrived").glob("*"))


def test_what_nobody_wants_is_dropped(trainer: Trainer, server: Server) -> None:
    follows(trainer, server)
    server.link.send(Shared(target_version=1, files=(header(contents(1)),)))
    step_until(lambda: trainer.sender.dropped, trainer, server)
