"""deploy/slurm/fleet.sbatch, run as Slurm runs it, by stand-ins for Slurm and for our programs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_lines import Fleet, Serve, parsed
from deployment import DEPLOY, passes

from tlt_server.process import free_port
from tlt_server.trainer.config import TrainConfig
from tlt_server.wire.sockets import CurveKeys, Inlet, Outlet

SCRIPT = DEPLOY / "slurm/fleet.sbatch"
STAND_IN = Path(__file__).with_name("slurm_stand_in.py")
NODES = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
ENDED = "while [ ! -e done ]; do sleep 0.1; done; exit 7"
pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from; RECORD in it is what was started."""
    (tmp_path / "bin").mkdir()
    for name in ("scontrol", "srun", "scancel", "tlt-server"):
        program = tmp_path / "bin" / name
        program.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}")
    given = {"RECORD": f"{tmp_path}/record", "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": ",".join(NODES)}
    given |= {"TLT_PORT": str(free_port()), "SLURM_SUBMIT_DIR": str(tmp_path)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@contextmanager
def submitted(job: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(["bash", SCRIPT, *command], cwd=job, text=True, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.terminate()


def started(job: Path) -> list[dict[str, Any]]:
    record = job / "record"
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def all_ended(job: Path) -> bool:
    return not [each["words"] for each in started(job) if lives(each["pid"])]


def test_shellcheck_finds_nothing() -> None:
    passes("shellcheck", SCRIPT)


def test_each_program_is_started_as_it_wants_to_be(job: Path) -> None:
    with submitted(job, "bash", "-c", "touch at-work; " + ENDED) as process:
        until(lambda: (job / "at-work").exists() and len(started(job)) == 4)
        found: dict[str, Any] = {}
        for each in started(job):
            files = {word: Path(word) for word in each["words"] if word.endswith(".toml")}
            found[f"{each['words'][0]} {each['node']}"] = parsed(["tlt-server", *each["words"]], files)
        (job / "done").touch()
        assert process.wait(20) == 7
    front, trainer = found.pop("fleet None"), found.pop(f"train {NODES[0]}")
    assert isinstance(front, Fleet)
    assert isinstance(trainer, TrainConfig)
    port = int(os.environ["TLT_PORT"])
    assert front.own["member"] == [f"http://{node}:{port}" for node in NODES[1:]]
    assert found.keys() == {f"serve {node}" for node in NODES[1:]}
    for server in found.values():
        assert isinstance(server, Serve)
        assert (server.sglang.host, server.sglang.port, server.insecure) == ("0.0.0.0", port, False)
        follows = server.config.trainer
        assert follows
        assert follows.address == trainer.listen.replace("0.0.0.0", NODES[0])
    keys = {tuple(each["keys"]) for each in started(job)}
    assert len(keys) == 1
    assert all(len(key) > 40 for key in keys.pop())
    assert all_ended(job)


def test_the_keys_of_trainer_and_servers_fit(job: Path) -> None:
    with submitted(job, "true") as process:
        assert process.wait(20) == 0
    folder = job / "tlt-17"
    trainer = parsed(["tlt-server", "train", "--tlt-config", "t"], {"t": folder / "trainer.toml"})
    server = parsed(["tlt-server", "serve", "--tlt-config", "s"], {"s": folder / "server.toml"})
    assert isinstance(trainer, TrainConfig)
    assert isinstance(server, Serve)
    follows = server.config.trainer
    assert follows
    assert follows.key
    assert follows.trainer_key
    inlet = Inlet("tcp://127.0.0.1:*", trainer.curve)
    outlet = Outlet(inlet.address, CurveKeys(Path(follows.key), Path(follows.trainer_key)))
    try:
        until(lambda: outlet.ready)
        outlet.send([b"hidden states"])
        until(lambda: inlet.receive() is not None)
    finally:
        outlet.close()
        inlet.close()


def test_what_dies_is_started_anew(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIES_ONCE", NODES[1])
    with submitted(job, "bash", "-c", ENDED) as process:
        until(lambda: [each["node"] for each in started(job)].count(NODES[1]) == 2)
        (job / "done").touch()
        assert process.wait(20) == 7
    assert "tlt-server serve ended with 1" in (job / f"tlt-17/logs/server-{NODES[1]}.log").read_text()
    assert all_ended(job)


def test_without_a_front_all_ends(job: Path) -> None:
    with submitted(job, "bash", "-c", "touch at-work; " + ENDED) as process:
        until(lambda: (job / "at-work").exists() and len(started(job)) == 4)
        (front,) = (each["pid"] for each in started(job) if each["words"][0] == "fleet")
        os.kill(front, signal.SIGKILL)
        assert process.wait(20) == 1
        assert process.stderr
        assert "the front ended" in process.stderr.read()
    assert all_ended(job)


def test_when_time_is_over_all_ends(job: Path) -> None:
    with submitted(job) as process:
        until(lambda: len(started(job)) == 4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    told = (job / "record.ended").read_text().split()
    assert {str(each["pid"]) for each in started(job)} == set(told), "some were killed, rather than told to end"
    assert all_ended(job)


def test_one_node_is_no_fleet(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", NODES[0])
    with submitted(job, "true") as process:
        assert process.wait(20) == 2
        assert process.stderr
        assert "ask for at least 2" in process.stderr.read()
    assert not started(job)
