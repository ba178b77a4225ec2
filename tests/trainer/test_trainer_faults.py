"""A trainer, or a server that follows it, is killed or stops for a while: what was learnt and said is not lost."""

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.killed_trainers import kill_beside_a_stand_in
from tests.trainer.line import Line
from tests.trainer.stand_in import Running, Server, contents, published, until

KILLS = 5
"""`python -m tests.server.faults` kills as many as one likes, beside a real server."""

CUT_S = 7.0
"""After which the server has lost its trainer: see `SILENCE` of the receiver."""


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_and_versions_grow(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")
    kill_beside_a_stand_in(tmp_path, KILLS, seed)


@pytest.mark.slow
def test_stopped_for_a_while_it_hears_what_happened_meanwhile(tmp_path: Path) -> None:
    trainer = Running(tmp_path / "trainer")
    with Server(tmp_path / "one", trainer.control, trainer.features) as server, trainer.process() as process:
        until(lambda: trainer.status().get("frozen") == 0, "the first target is not followed")
        process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            server.publish()
            server.share()
        time.sleep(CUT_S)
        assert not server.link.connected
        process.send_signal(signal.SIGCONT)
        until(lambda: server.link.connected, "the link is not there again")
        until(lambda: trainer.status()["frozen"] == trainer.status()["target"] > 0, "the target is not followed")
        server.push(range(40))
        until(lambda: server.arrived, "nothing was published")
        assert server.arrived[0].trained_on == 2
        trainer.end(process)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "silence"])
def test_a_line_that_fails_in_the_middle_of_a_drafter(tmp_path: Path, fault: str) -> None:
    trainer = Running(tmp_path / "trainer")
    with (
        Line(trainer.control.removeprefix("ipc://")) as control,
        Line(trainer.features.removeprefix("ipc://")) as features,
        Server(tmp_path / "one", control.address, features.address) as server,
        trainer.process() as process,
    ):
        until(lambda: trainer.status().get("frozen") == 0, "the first target is not followed")
        server.held = True  # so that no other drafter follows the first
        control.rate = 1e6
        control.after(600_000, getattr(control, fault))
        server.push(range(40))
        until(lambda: not control.is_whole, "no drafter is on its way")
        getattr(features, fault)()
        time.sleep(CUT_S)
        assert not server.link.connected
        assert not server.arrived
        control.rate = 0
        for line in (control, features):
            line.restore()
        until(lambda: server.arrived, "no drafter arrives")
        assert contents(Path(server.arrived[-1].path)) == contents(published(trainer, server.newest))
        received = trainer.status()["tokens_received"]
        server.push(range(40, 80))
        until(lambda: trainer.status()["tokens_received"] > received, "no features arrive")
        trainer.end(process)


@pytest.mark.slow
def test_a_server_that_is_stuck_holds_up_no_other(tmp_path: Path) -> None:
    trainer = Running(tmp_path / "trainer")
    with (
        Server(tmp_path / "one", trainer.control, trainer.features) as one,
        trainer.process() as process,
        follower(tmp_path / "two", trainer) as two,
    ):
        until(lambda: len(trainer.status().get("servers", [])) == 2, "not both are known")
        one.push(range(40))
        until(lambda: one.arrived and drafter_of(tmp_path / "two"), "not both follow")
        two.send_signal(signal.SIGSTOP)
        one.publish()
        one.share()
        one.push(range(40, 80))
        until(lambda: one.arrived[-1].trained_on == 1, "the one waits for the other")
        assert drafter_of(tmp_path / "two") < one.newest
        two.send_signal(signal.SIGCONT)
        until(lambda: drafter_of(tmp_path / "two") == one.newest, "the other does not catch up")
        trainer.end(process)


@contextlib.contextmanager
def follower(folder: Path, trainer: Running) -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, "-m", "tests.trainer.follower", str(folder), trainer.control, trainer.features, "two:2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)  # one that is stopped does not see that stdin ends


def drafter_of(folder: Path) -> int:
    """The version that a follower has received last; 0: none."""
    return max((int(path.stem.removeprefix("drafter-")) for path in folder.glob("drafters/drafter-*")), default=0)
