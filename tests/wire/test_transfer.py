"""A drafter from trainer to server: whole, once, the latest; and the files that hold it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tlt_client import DrafterUpdate

from tests.wire.ends import (
    CHUNK,
    HELLO,
    MODEL,
    Asker,
    Hands,
    NewServer,
    NewTrainer,
    Trainer,
    drafter,
    holds,
    outgoing,
    step_for,
    step_until,
)
from tlt_server.errors import ConfigError, WireError
from tlt_server.wire.files import WINDOW
from tlt_server.wire.messages import Chunk, ChunksWanted, Heartbeat, Message, Offer
from tlt_server.wire.server import HELLO_EVERY, SILENCE


def test_a_drafter_crosses(new_trainer: NewTrainer, new_server: NewServer) -> None:
    server = new_server(trainer := new_trainer())
    step_until(trainer.said, trainer, server)
    trainer.publish(1, 5, drafter(1))
    step_until(lambda: trainer.is_told(newest_drafter=1), trainer, server)
    [ready] = server.said(DrafterUpdate)
    assert (ready.version, ready.trained_on) == (1, 5)
    assert holds(ready.path, drafter(1))
    assert server.files() == ["drafter-1.safetensors"]
    assert {name.partition("/")[0] for name, _ in trainer.heard} == {HELLO.server}


@pytest.mark.parametrize("chunks", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_any_number_of_chunks(new_trainer: NewTrainer, new_server: NewServer, chunks: int) -> None:
    server = new_server(trainer := new_trainer())
    trainer.publish(1, 0, drafter(1, chunks))
    step_until(server.drafters, trainer, server)
    assert holds(server.folder / "drafter-1.safetensors", drafter(1, chunks))


def test_a_late_server_gets_the_latest(new_trainer: NewTrainer, new_server: NewServer) -> None:
    trainer = new_trainer()
    for version in (1, 2, 3):
        trainer.publish(version, 0, drafter(version))
        trainer.step()
    server = new_server(trainer)
    step_until(server.drafters, trainer, server)
    assert server.drafters() == [3]


def test_a_restarted_server_gets_the_latest_again(new_trainer: NewTrainer, new_server: NewServer) -> None:
    server = new_server(trainer := new_trainer())
    trainer.publish(4, 0, drafter(4))
    step_until(server.drafters, trainer, server)
    server.close()
    assert server.files() == []
    again = new_server(trainer, folder=server.folder)
    step_until(again.drafters, trainer, again)
    assert holds(again.said(DrafterUpdate)[0].path, drafter(4))


def test_a_slow_server_holds_no_other_up(new_trainer: NewTrainer, new_server: NewServer) -> None:
    slow, quick = new_server(trainer := new_trainer()), new_server(trainer)
    step_until(lambda: len(trainer.said()) >= 2, trainer, slow, quick)
    trainer.publish(1, 0, drafter(1, 50))
    step_until(quick.drafters, trainer, quick)
    assert not slow.drafters()
    step_until(slow.drafters, trainer, slow)
    assert holds(slow.said(DrafterUpdate)[0].path, drafter(1, 50))


def test_only_the_last_of_several_published_at_once(new_trainer: NewTrainer, new_server: NewServer) -> None:
    server = new_server(trainer := new_trainer())
    step_until(trainer.said, trainer, server)
    for version in (1, 2, 3):
        trainer.publish(version, 0, drafter(version))
    step_until(server.drafters, trainer, server)
    assert server.drafters() == [3]


def test_a_newer_one_ends_a_transfer_under_way(new_trainer: NewTrainer, new_server: NewServer) -> None:
    server = new_server(trainer := new_trainer())
    trainer.publish(1, 0, drafter(1, 200))
    step_until(lambda: any(server.folder.glob("*.partial")), trainer, server)
    step_for(0.02, trainer, server)
    assert not server.drafters()
    trainer.publish(2, 0, drafter(2))
    step_until(server.drafters, trainer, server)
    step_for(0.05, trainer, server)
    assert server.drafters() == [2]
    assert server.files() == ["drafter-2.safetensors"]
    assert server.link.rejected.total() == 0


@pytest.mark.parametrize("version", [0, 4, 5])
def test_versions_only_grow_at_the_sender(new_trainer: NewTrainer, version: int) -> None:
    trainer = new_trainer()
    trainer.publish(5, 0, drafter(5))
    with pytest.raises(WireError, match=f"drafter version {version} is not higher than 5"):
        trainer.publish(version, 0, drafter(1))


def restarted(trainer: Trainer, new_trainer: NewTrainer) -> Trainer:
    address = trainer.link.address
    trainer.close()
    return new_trainer(address)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "seed", "refusal"),
    [
        (3, 3, None),
        (3, 4, "version 3 came before with other contents"),
        (2, 3, "version 2 is older than 3, which this server was given"),
    ],
    ids=["duplicate", "same version, other contents", "older"],
)
def test_a_trainer_that_starts_anew_and_repeats_itself(
    new_trainer: NewTrainer, new_server: NewServer, version: int, seed: int, refusal: str | None
) -> None:
    server = new_server(trainer := new_trainer())
    trainer.publish(3, 0, drafter(3))
    step_until(server.drafters, trainer, server)
    trainer = restarted(trainer, new_trainer)
    trainer.publish(version, 0, drafter(seed))
    step_until(lambda: trainer.is_told(offer=outgoing(seed, version).digest), trainer, server)
    assert [reason.partition(":")[0] for reason in server.refusals()] == ([refusal] if refusal else [])
    assert (refusal or "") in trainer.said()[-1].reason
    assert bool(trainer.said()[-1].reason) == bool(refusal)
    assert server.drafters() == [3]
    assert holds(server.folder / "drafter-3.safetensors", drafter(3))
    assert trainer.said()[-1].newest_drafter == 3


@pytest.mark.slow
def test_a_trainer_that_starts_anew_goes_on_where_it_was(new_trainer: NewTrainer, new_server: NewServer) -> None:
    server = new_server(trainer := new_trainer())
    trainer.publish(1, 0, drafter(1, 100))
    [partial] = (
        step_until(lambda: list(server.folder.glob("*.partial")), trainer, server),
        server.folder.glob("*.partial"),
    )[1]
    step_until(lambda: partial.stat().st_size >= 30 * CHUNK, trainer, server)
    inode = partial.stat().st_ino
    trainer = restarted(trainer, new_trainer)
    step_for(0.1, trainer, server)
    assert partial.stat().st_size >= 30 * CHUNK
    trainer.publish(1, 0, drafter(1, 100))
    step_until(server.drafters, trainer, server)
    assert (server.folder / "drafter-1.safetensors").stat().st_ino == inode
    assert holds(server.folder / "drafter-1.safetensors", drafter(1, 100))


def test_a_server_that_refused_is_not_offered_it_again(new_trainer: NewTrainer, new_server: NewServer) -> None:
    other = msgspec.structs.replace(HELLO, newest_drafter=9)
    hands = Hands()
    server = new_server(trainer := new_trainer(clock=hands), hello=other, clock=hands)
    trainer.publish(3, 0, drafter(3))
    step_until(lambda: trainer.is_told(settled_drafter=3), trainer, server)
    offered: list[Message] = []
    trainer.link.send = lambda message, *rest, to: offered.append(message)  # type: ignore[method-assign,assignment,func-returns-value]
    for _ in range(5):
        hands.now += HELLO_EVERY
        step_for(0.02, trainer, server)
    assert len(trainer.said()) >= 5
    assert offered.count(Heartbeat()) == len(offered) >= 5


def test_a_trainer_wants_the_step_times_of_those_whose_devices_it_paces_itself_on(
    new_trainer: NewTrainer, new_server: NewServer
) -> None:
    trainer = new_trainer(paced=("GPU-a", "GPU-b"))
    beside, away = (
        new_server(trainer, hello=msgspec.structs.replace(HELLO, server=name, devices=devices))
        for name, devices in (("beside", ("GPU-c", "GPU-b")), ("away", ("GPU-d",)))
    )
    step_until(lambda: beside.is_connected and away.is_connected, trainer, beside, away)
    assert [beside.receiver.wants_times, away.receiver.wants_times] == [True, False]


def test_what_could_not_be_written_is_fetched_from_a_trainer_that_is_back(
    new_trainer: NewTrainer, new_server: NewServer, hands: Hands
) -> None:
    server = new_server(trainer := new_trainer(), clock=hands)
    server.folder.rmdir()
    trainer.publish(1, 0, drafter(1))
    step_until(lambda: trainer.is_told(settled_drafter=1), trainer, server)
    assert "No such file or directory" in trainer.said()[-1].reason
    server.folder.mkdir()
    hands.now += HELLO_EVERY
    step_for(0.1, trainer, server)
    assert not server.drafters()
    step_for(0.05, server)
    hands.now += SILENCE
    step_until(lambda: not server.is_connected, server)
    step_until(lambda: server.is_connected, trainer, server)
    hands.now += HELLO_EVERY
    step_until(server.drafters, trainer, server)
    assert holds(server.folder / "drafter-1.safetensors", drafter(1))


@pytest.mark.slow
def test_a_server_of_another_model_is_turned_away(new_trainer: NewTrainer, new_server: NewServer) -> None:
    trainer = new_trainer()
    other = msgspec.structs.replace(HELLO, model=msgspec.structs.replace(MODEL, vocab_size=9))
    server = new_server(trainer, hello=other)
    trainer.publish(1, 0, drafter(1))
    server.change(target_version=1, weight_version="x")
    step_until(lambda: trainer.link.rejected.total() >= 2, trainer, server)
    assert trainer.heard == []
    assert server.heard == []


def test_a_server_that_asks_for_what_is_not_there_gets_nothing(
    new_trainer: NewTrainer, keep: Callable[[Any], None]
) -> None:
    trainer = new_trainer()
    trainer.publish(1, 0, drafter(1))
    keep(server := Asker(trainer.link.address))
    step_until(lambda: server.take(Offer), trainer, server)
    digest = outgoing(1).digest
    for ask in (
        ChunksWanted(digest=bytes(32), start=0, stop=4),
        ChunksWanted(digest=digest, start=11, stop=12),
        ChunksWanted(digest=digest, start=2**40, stop=2**40 + 4),
        ChunksWanted(digest=digest, start=9, stop=13),
    ):
        assert server.link.send(ask)
    chunks: list[Chunk] = []
    step_until(lambda: chunks.extend(server.take(Chunk)) or len(chunks) == 2, trainer, server)
    step_for(0.05, trainer, server)
    assert [chunk.index for chunk in chunks] == [9, 10]
    assert not server.take(Chunk)


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_piles_up(new_trainer: NewTrainer, new_server: NewServer) -> None:
    server = new_server(trainer := new_trainer())

    def push(version: int) -> int:
        trainer.publish(version, 0, drafter(version))
        step_until(lambda: version in server.drafters(), trainer, server)
        assert server.files() == [f"drafter-{version}.safetensors"]
        return len(os.listdir("/proc/self/fd"))

    push(1)
    before = push(2)
    assert [push(version) for version in range(3, 60)][-1] == before


def test_a_superseded_file_stays_readable_for_who_has_it_open(new_trainer: NewTrainer, new_server: NewServer) -> None:
    server = new_server(trainer := new_trainer())
    trainer.publish(1, 0, drafter(1))
    step_until(server.drafters, trainer, server)
    with open(server.said(DrafterUpdate)[0].path, "rb") as file:
        whole = Path(file.name).read_bytes()
        trainer.publish(2, 0, drafter(2))
        step_until(lambda: len(server.drafters()) == 2, trainer, server)
        assert not Path(file.name).exists()
        assert file.read() == whole


def test_what_an_earlier_life_left_whole_is_removed(
    new_trainer: NewTrainer, new_server: NewServer, tmp_path: Path
) -> None:
    (folder := tmp_path / "left").mkdir()
    (folder / "drafter-12.safetensors").write_bytes(b"?")
    (folder / "0123.partial").write_bytes(b"?")
    server = new_server(trainer := new_trainer(), folder=folder)
    assert server.files() == ["0123.partial"]
    trainer.publish(1, 0, drafter(1))
    step_until(server.drafters, trainer, server)
    assert server.files() == ["drafter-1.safetensors"]


def test_two_receivers_do_not_share_a_folder(new_trainer: NewTrainer, new_server: NewServer, tmp_path: Path) -> None:
    first = new_server(trainer := new_trainer())
    with pytest.raises(ConfigError, match="is another receiver's: give each server its own"):
        new_server(trainer, folder=first.folder)
    first.close()
    new_server(trainer, folder=first.folder)


def test_a_folder_that_is_a_file_is_a_config_error(
    new_trainer: NewTrainer, new_server: NewServer, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="drafter folder"):
        new_server(new_trainer(), folder=tmp_path / "file")
