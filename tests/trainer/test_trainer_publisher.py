"""Drafters on their way out: nobody waits for the disk, and nothing is told of that is not whole."""

import threading
from collections.abc import Mapping
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import torch

from tests.trainer.models import FOLDERS
from tests.trainer.stand_in import MODEL
from tlt_server.errors import ConfigError, DiskFailed
from tlt_server.trainer.publish.folder import Drafter, load_drafter
from tlt_server.trainer.publish.published import Edition, Published
from tlt_server.trainer.publish.publisher import Publisher
from tlt_server.wire.messages import READS_TO_TRAINER
from tlt_server.wire.sockets import Link
from tlt_server.wire.trainer import Sender

FACTS = {"trained_on": "7", "steps": "3"}
SOON_S = 30


class Slow(Published):
    """A disk that waits until it is told to go on, and may have no room then."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.goes_on, self.error = threading.Event(), DiskFailed("")

    def add(self, drafter: Drafter, version: int, provenance: Mapping[str, str]) -> Edition:
        assert self.goes_on.wait(SOON_S)
        self.goes_on.clear()
        if str(self.error):
            raise self.error
        return super().add(drafter, version, provenance)


def until_idle(publisher: Publisher) -> None:
    while publisher.is_busy:
        publisher.collect()


def test_a_drafter_is_the_newest_once_it_is_whole_and_is_what_it_was_when_it_was_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    published, drafter = Slow(tmp_path), load_drafter(FOLDERS["eagle"])
    with closing(Link(f"ipc://{tmp_path}/control", READS_TO_TRAINER)) as link:
        publisher = Publisher(published, Sender(link, MODEL, lambda *_: None))
        with publisher.open():
            before = {name: each.clone() for name, each in drafter.weights().items()}
            publisher.publish(drafter.copied(), 1, 4, FACTS, "it is the first")
            for weight in drafter.network.parameters():
                weight.data += 1.0  # training goes on
            publisher.collect()
            assert (publisher.is_busy, publisher.newest, publisher.target) == (True, 0, -1)
            published.goes_on.set()
            until_idle(publisher)
            assert (publisher.newest, publisher.target) == (1, 4)
            written = published.network(1)
            assert written is not None
            assert all(torch.equal(written.state_dict()[name], each) for name, each in before.items())

            published.error = DiskFailed("no room")
            published.goes_on.set()
            publisher.publish(drafter.copied(), 2, 5, FACTS, "it is better")
            until_idle(publisher)
            assert (publisher.newest, publisher.target) == (1, 4)
            assert "no room. Training goes on" in caplog.text

            published.error = DiskFailed("")
            publisher.publish(drafter.copied(), 2, 6, FACTS, "it is better still")
            published.goes_on.set()
        assert (publisher.newest, publisher.target) == (2, 6), "the end does not cut it"
        assert Publisher(published, Sender(link, MODEL, lambda *_: None)).newest == 2


def test_what_ends_it_is_not_swallowed(tmp_path: Path) -> None:
    published, drafter = Published(tmp_path), load_drafter(FOLDERS["eagle"])
    with closing(Link(f"ipc://{tmp_path}/control", READS_TO_TRAINER)) as link:
        publisher = Publisher(published, Sender(link, MODEL, lambda *_: None))
        with publisher.open():
            for version in (1, 1):
                with pytest.raises(ConfigError, match="exists") if publisher.newest else nullcontext():
                    publisher.publish(drafter.copied(), version, 0, FACTS, "it is good")
                    until_idle(publisher)
