"""Ends of links, closed when the test is over."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.wire.ends import End, Hands, Script, Server, Trainer
from tlt_server.wire.sockets import Link


@pytest.fixture
def keep() -> Iterator[Callable[[End], None]]:
    kept: list[End] = []
    yield kept.append
    for end in kept:
        if end.open:
            end.close()


@pytest.fixture
def new_trainer(keep: Callable[[End], None]) -> Callable[..., Trainer]:
    def make(*args: Any, **options: Any) -> Trainer:
        keep(trainer := Trainer(*args, **options))
        return trainer

    return make


@pytest.fixture
def new_server(keep: Callable[[End], None], tmp_path: Path) -> Callable[..., Server]:
    """A server that connects to a trainer, with a folder of its own or `folder`."""
    count = iter(range(100))

    def make(trainer: End, folder: Path | None = None, **options: Any) -> Server:
        keep(server := Server(trainer.link.address, folder or tmp_path / f"drafters{next(count)}", **options))
        return server

    return make


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def opened() -> Iterator[Callable[..., Link]]:
    links: list[Link] = []

    def make(*args: Any, **options: Any) -> Link:
        links.append(Link(*args, **options))
        return links[-1]

    yield make
    for link in links:
        link.close()


@pytest.fixture
def script(keep: Callable[[End], None]) -> Script:
    keep(end := Script())
    return end
