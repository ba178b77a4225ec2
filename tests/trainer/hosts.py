"""A trainer and two servers on hosts of their own, as far as network, CURVE keys and files go: in namespaces.

`unshare --net --mount python -m tests.trainer.hosts FOLDER` is the trainer's host, and starts the servers'.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import zmq.auth

from tests.trainer.models import TARGET_FOLDER
from tests.trainer.stand_in import Running, Server, until
from tlt_server.drafter.folder import create
from tlt_server.wire.sockets import CurveKeys

NETWORK = "10.77.0"
SERVERS = {"one:1": 2, "two:2": 3}
"""By name: the host's number."""


def sh(*words: str) -> None:
    subprocess.run(words, check=True)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Host:
    """Of a server, told by lines what to do."""

    def __init__(self, name: str, folder: Path, trainer: Running) -> None:
        number = SERVERS[name]
        command = ["unshare", "--net", "--mount", sys.executable, "-m", "tests.trainer.hosts"]
        command += [str(folder), name, trainer.control, trainer.features]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "waits\n"  # in namespaces of its own
        sh("ip", "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", str(self._process.pid))
        sh("ip", "link", "set", f"v{number}", "master", "br0", "up")

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate(timeout=30)
        assert self._process.returncode == 0


def serve(folder: Path, name: str, control: str, features: str) -> None:
    """On a server's host, until its standard input ends."""
    say("waits")
    while "eth0" not in Path("/proc/net/dev").read_text():
        time.sleep(0.05)
    sh("ip", "addr", "add", f"{NETWORK}.{SERVERS[name]}/24", "dev", "eth0")
    sh("ip", "link", "set", "eth0", "up")
    sh("ip", "link", "set", "lo", "up")
    keys = folder / "keys"
    own = folder / "own"
    own.mkdir(exist_ok=True)
    sh("mount", "-t", "tmpfs", "none", str(own))  # no other host sees what lies there
    curve = CurveKeys(keys / f"{name[:3]}.key_secret", keys / "trainer.key")
    create(str(TARGET_FOLDER), own / "drafter", seed=SERVERS[name])
    with Server(own, control, features, name, curve=curve, drafter=own / "drafter") as server:
        for line in sys.stdin:
            match line.split():
                case ["push", first, stop]:
                    server.push(range(int(first), int(stop)))
                case ["publish"]:
                    server.publish()
                    server.share()
            say(json.dumps([[each.version, each.trained_on] for each in server.arrived]))


def main(folder: Path) -> None:
    """On the trainer's host."""
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "link", "add", "br0", "type", "bridge")
    sh("ip", "addr", "add", f"{NETWORK}.1/24", "dev", "br0")
    sh("ip", "link", "set", "br0", "up")
    keys, known = folder / "keys", folder / "known"
    for each in (keys, known):
        each.mkdir()
    for name in ("trainer", "one", "two"):
        zmq.auth.create_certificates(keys, name)
        os.chmod(keys / f"{name}.key_secret", 0o600)
    for name in ("one", "two"):
        shutil.copy(keys / f"{name}.key", known)
    settings = f'key = "{keys}/trainer.key_secret"\nserver_keys = "{known}"'
    trainer = Running(folder / "trainer", settings, tcp=f"{NETWORK}.1")
    with trainer.process() as process:
        until(trainer.status, "the trainer does not answer")
        one, two = (Host(name, folder, trainer) for name in SERVERS)
        until(lambda: trainer.status()["frozen"] == 0, f"the first target does not arrive: {trainer.log}")
        assert not list((folder / "own").iterdir())
        assert "training begins with drafter 0 of" in trainer.log
        one.ask("push 0 40")
        until(lambda: one.ask("?") and two.ask("?"), f"no drafter arrives: {trainer.log}")
        for host in (one, two):
            host.ask("publish")
        until(lambda: trainer.status()["frozen"] == 1, f"the second target does not arrive: {trainer.log}")
        two.ask("push 40 80")
        until(
            lambda: [host.ask("?")[-1][1] for host in (one, two)] == [1, 1],
            f"no drafter for the second target arrives: {trainer.log}",
        )
        one.end()
        two.end()
        trainer.end(process)
    say("all arrived")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        serve(Path(sys.argv[1]), *sys.argv[2:])
    else:
        main(Path(sys.argv[1]))
