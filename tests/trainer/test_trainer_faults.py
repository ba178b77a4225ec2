"""A trainer, or a server that follows it, is killed or stops for a while: what was learnt and said is not lost."""

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.trainer.killed_trainers import kill
from tests.trainer.stand_in import Running, Server, until

KILLS = 5
"""By hand, `python -m tests.trainer.killed_trainers FOLDER COUNT SEED` kills as many as one likes."""

CUT_S = 7.0
"""After which both ends have given the connection up: see `SILENCE` of the receiver, and the sockets' heartbeats."""


def test_killed_at_any_moment_it_goes_on_and_versions_grow(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")
    kill(tmp_path, KILLS, seed)


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
