"""`tlt-server train` beside a real server: what they share, and what a server that was killed gets back."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from tlt_client import Client, SamplingParams

from tests.server import faults
from tests.server.conftest import PROMPTS, Servers
from tests.server.warm import warm_process
from tests.trainer.stand_in import Outlet, until
from tests.trainer.stand_in import Running as Trainer

pytestmark = pytest.mark.server
NAME = "a server"
SAMPLED = SamplingParams(temperature=1, max_new_tokens=128)
WINDOW_S = 6.0  # in which steps are counted


def followed(trainer: Trainer, folder: Path) -> list[str]:
    """Flags of a server that has no drafter but what this trainer sends."""
    settings = folder / "server.toml"
    settings.write_text(f'drafter = "auto"\n[trainer]\naddress = "{trainer.control}"\nserver = "{NAME}"\n')
    return ["--tlt-config", str(settings)]


def _worker(trainer: Trainer) -> dict[str, object]:
    (worker,) = trainer.status()["workers"]
    return dict(worker)


def test_a_server_that_was_killed_gets_the_latest_drafter_at_its_start(servers: Servers, tmp_path: Path) -> None:
    """From a trainer that shares its device, and trains while the server has nothing to do."""
    servers.close()
    trainer, log = Trainer(tmp_path / "trainer", "passes = 2.0", tables="[spot]\non = true"), tmp_path / "log"
    flags = followed(trainer, tmp_path)
    with trainer.process() as process:
        with warm_process(flags, log) as server:
            until(lambda: trainer.status().get("frozen") == 0, "embedding and head of the target are not shared")
            outlet = Outlet(trainer.features, NAME)
            outlet.push(range(40))
            with Client(server.url) as client:
                until(lambda: client.drafter().live.version > 0, "no drafter takes over")
                assert client.status().devices == [_worker(trainer)["device"]]
                with closing(
                    client.stream(PROMPTS[0], SamplingParams(max_new_tokens=1500, ignore_eos=True))
                ) as rollout:
                    next(rollout)
                    until(lambda: _worker(trainer)["state"] == "busy", "it does not hear of the load")
                until(lambda: _worker(trainer)["state"] == "training", "it does not hear that the load is gone")
            until(lambda: trainer.status()["state"] == "waiting for features", "it trains for ever")
            outlet.close()
            os.killpg(server.pid, signal.SIGKILL)
        with warm_process(flags, log) as server, Client(server.url) as client:
            until(lambda: client.drafter().live.version == trainer.status()["published"], "it is not sent again")
            (rollout,) = client.generate_batch(PROMPTS[:1], SamplingParams(temperature=0, max_new_tokens=32))
            assert rollout.accept_length is not None
        trainer.end(process)
    assert not {"Traceback", "refuses"} & set(trainer.log.split()), trainer.log


def test_beside_rollouts_that_do_not_drain_it_trains_as_fast_as_it_may(servers: Servers, tmp_path: Path) -> None:
    """It rests after each step, as long as what the server says of its own steps asks for."""
    servers.close()
    tables = "[spot]\non = true\nsettle_s = 0.1\nslowdown = 0.02"
    trainer = Trainer(tmp_path / "trainer", "passes = 1000.0", judged_every=10**6, tables=tables)
    long, over = SamplingParams(max_new_tokens=1000, ignore_eos=True), threading.Event()

    def roll_out(client: Client) -> None:
        while not over.is_set():
            client.generate_batch(PROMPTS[:4], long)

    with (
        trainer.process() as process,
        warm_process(followed(trainer, tmp_path), tmp_path / "log") as server,
        Client(server.url) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        until(lambda: trainer.status().get("frozen") == 0, "embedding and head of the target are not shared")
        rollouts = pool.submit(roll_out, client)
        try:
            until(lambda: trainer.status()["slowdown"], "it does not train, or nothing is said of what it costs")
            until(lambda: trainer.status()["state"] == "waiting for rollouts on its GPU", "it does not rest")
            assert _worker(trainer)["state"] == "training", "it keeps its memory"
            slow = _steps_a_second(trainer, WINDOW_S, 1)
        finally:
            over.set()
        rollouts.result()
        # at the least cost that is believed a step is followed by 1.55 times as long a rest
        assert _steps_a_second(trainer, WINDOW_S) > 2 * slow, "without load it goes no faster"
        trainer.end(process)
    assert not {"Traceback", "refuses"} & set(trainer.log.split()), trainer.log


def _steps_a_second(trainer: Trainer, seconds: float, more: int = 0) -> float:
    """Over so many seconds. more: steps that it might have taken, had it been asked a moment later."""
    before = until(lambda: trainer.status()["steps"], "it has not begun")
    time.sleep(seconds)
    return float(trainer.status()["steps"] - before + more) / seconds


@pytest.fixture(scope="module")
def at(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[faults.Scene]:
    """A server without a drafter but what its trainer sends; rollouts go on all the time. No other server beside it:
    tests that start one come before."""
    servers.close()
    with faults.scene(tmp_path_factory.mktemp("scene")) as made:
        yield made


def test_it_learns_from_what_a_server_taps(at: faults.Scene) -> None:
    """From nothing: no step speculates before a drafter comes that was trained on this server's own rollouts."""
    with at.trainer.process() as process:
        at.grows("begins")
        status = at.trainer.status()
        assert status["tokens_received"] >= 256
        assert set(status["tokens_dropped"]) <= {"unknown target"}
        lengths = [rollout.accept_length or 0 for rollout in at.client.generate_batch(PROMPTS, SAMPLED)]
        assert max(lengths) > 1
        at.trainer.end(process)
    at.check()


def test_a_trainer_that_is_killed_beside_a_server(at: faults.Scene) -> None:
    """More kills, and more of what follows: `python -m tests.server.faults`."""
    faults.kill(at, 1, seed=1)


def test_a_line_that_is_cut_in_the_middle_of_a_drafter(at: faults.Scene) -> None:
    faults.cut(at, 1)


def test_no_features_are_mixed_where_their_line_is_cut(at: faults.Scene) -> None:
    found = faults.mix(at, 2)
    assert found["features_compared"] > 100


def test_a_trainer_that_stops_holds_up_no_rollout(at: faults.Scene) -> None:
    faults.stop(at, 3.0)
