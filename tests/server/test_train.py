"""`tlt-server train` beside a real server: what they share, and what a server that was killed gets back."""

import os
import signal
import time
from pathlib import Path

import pytest
from tlt_client import Client, SamplingParams

from tests.server.conftest import PROMPTS, Servers
from tests.trainer.stand_in import Outlet, until
from tests.trainer.stand_in import Running as Trainer
from tlt_server.process import running_module

pytestmark = pytest.mark.server
NAME = "a server"


def followed(trainer: Trainer, folder: Path) -> list[str]:
    """Flags of a server that has no drafter but what this trainer sends."""
    settings = folder / "server.toml"
    settings.write_text(f'drafter = "auto"\n[trainer]\naddress = "{trainer.control}"\nserver = "{NAME}"\n')
    return ["--tlt-config", str(settings)]


def test_it_learns_from_what_a_server_taps(servers: Servers, tmp_path: Path) -> None:
    """From nothing: no step speculates before a drafter comes that was trained on this server's own rollouts."""
    servers.close()
    trainer, sampling = Trainer(tmp_path / "trainer"), SamplingParams(temperature=1, max_new_tokens=128)
    server = running_module(["tlt_server", "serve"], followed(trainer, tmp_path), tmp_path / "log", start_timeout=180)
    with trainer.process() as process, server as running, Client(running.url) as client:
        deadline = time.monotonic() + 180
        while not client.drafter().live.version and time.monotonic() < deadline:
            client.generate_batch(PROMPTS, sampling)
        assert client.drafter().live.version, trainer.log
        status = trainer.status()
        assert status["tokens_received"] > 1000
        assert set(status["tokens_dropped"]) <= {"unknown target"}
        lengths = [rollout.accept_length or 0 for rollout in client.generate_batch(PROMPTS, sampling)]
        assert max(lengths) > 1
        trainer.end(process)


def test_a_server_that_was_killed_gets_the_latest_drafter_at_its_start(servers: Servers, tmp_path: Path) -> None:
    servers.close()
    trainer, log = Trainer(tmp_path / "trainer", "passes = 2.0"), tmp_path / "log"
    flags = followed(trainer, tmp_path)
    with trainer.process() as process:
        with running_module(["tlt_server", "serve"], flags, log, start_timeout=180) as server:
            until(lambda: trainer.status().get("frozen") == 0, "embedding and head of the target are not shared")
            outlet = Outlet(trainer.features, NAME)
            outlet.push(range(40))
            with Client(server.url) as client:
                until(lambda: client.drafter().live.version > 0, "no drafter takes over")
            until(lambda: trainer.status()["state"] == "waiting for features", "it trains for ever")
            outlet.close()
            published = trainer.status()["published"]
            os.killpg(server.pid, signal.SIGKILL)
        again = running_module(["tlt_server", "serve"], flags, log, start_timeout=180)
        with again as server, Client(server.url) as client:
            until(lambda: client.drafter().live.version == published, "it is not sent again")
            (rollout,) = client.generate_batch(PROMPTS[:1], SamplingParams(temperature=0, max_new_tokens=32))
            assert rollout.accept_length is not None
        trainer.end(process)
    assert not {"Traceback", "refuses"} & set(trainer.log.split()), trainer.log
