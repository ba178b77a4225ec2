"""The link lives as long as its server: anew when it dies, and not a moment longer, however the server ends."""

import multiprocessing
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.link.processes import MARK, dies, idle, links, server_process, until
from tlt_server.link.process import kept, run


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(MARK, str(tmp_path))
    return str(tmp_path)


@pytest.mark.slow
def test_one_that_is_killed_is_started_anew(mark: str, tmp_path: Path) -> None:
    with kept(run, idle(tmp_path / "drafters"), first_pause=0.05):
        until(lambda: links(mark))
        (first,) = links(mark)
        until(lambda: first not in psutil.Process().children(recursive=True))
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: links(mark) not in ([], [first]))
        assert len(links(mark)) == 1
    until(lambda: not links(mark), 5)


@pytest.mark.slow
def test_it_ends_within_any_step_of_its_start(mark: str, tmp_path: Path) -> None:
    for pause in (0.0, 0.1, 0.4):
        with kept(run, idle(tmp_path / "drafters")):
            time.sleep(pause)
        until(lambda: not links(mark), 5)


@pytest.mark.slow
def test_it_ends_with_a_server_that_is_killed_with_all_its_descendants(mark: str, tmp_path: Path) -> None:
    folder = tmp_path / "drafters"
    server = multiprocessing.get_context("spawn").Process(target=server_process, args=(folder,))
    server.start()
    until(lambda: links(mark))
    folder.mkdir()
    time.sleep(0.2)  # until who has started it is gone
    for process in (*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)):
        process.kill()
    until(lambda: not links(mark), 5)
    until(lambda: not folder.exists(), 5)
    server.join()
    server.close()


@pytest.mark.slow
def test_pauses_grow(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with kept(dies, log, first_pause=0.2):
        until(lambda: log.exists() and len(log.read_text().splitlines()) == 4)
    starts = [float(line) for line in log.read_text().splitlines()]
    assert all(
        later - earlier > pause for (earlier, later), pause in zip(pairwise(starts), (0.2, 0.4, 0.8), strict=True)
    )
