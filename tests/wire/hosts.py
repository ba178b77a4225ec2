"""A trainer and five servers on hosts of their own, in network namespaces; the fifth is seen by the trainer alone.

`unshare --net python -m tests.wire.hosts FOLDER` is the trainer's host, and starts the servers'.
"""

import asyncio
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import msgspec
import zmq.auth
from tlt_client import DrafterUpdate

from benchmarks.lib.fleet.receivers import CountingLink
from tests.link.processes import until
from tests.wire.ends import HELLO, MODEL, drafter, holds
from tlt_server.wire.messages import READS_TO_SERVER, READS_TO_TRAINER
from tlt_server.wire.server import Receiver
from tlt_server.wire.sockets import CurveKeys, Link
from tlt_server.wire.trainer import Sender

PORT, CHUNK, CHUNKS = 7000, 64 << 10, 100
SERVERS = {"one": "10.77.0.2", "two": "10.77.0.3", "three": "10.77.0.4", "four": "10.77.0.5", "apart": "10.78.0.2"}


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


class Host:
    """Of a server. versions: that it has."""

    def __init__(self, name: str, folder: Path) -> None:
        network = SERVERS[name].rpartition(".")[0]
        command = ["unshare", "--net", sys.executable, "-m", "tests.wire.hosts", str(folder), name, f"{network}.1"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "waits\n"  # in a namespace of its own
        sh(f"ip link add v-{name} type veth peer name eth0 netns {self.process.pid}")
        sh(f"ip link set v-{name} master br{network[4]} up")
        self.versions: list[int] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.versions += map(int, self.process.stdout)


@cache
def file(version: int) -> bytes:
    return drafter(version, CHUNKS * CHUNK // 1024)


def serve(folder: Path, name: str, trainer: str) -> None:
    """On a server's host: says which drafters it has, whole."""
    print("waits", flush=True)  # noqa: T201
    while "eth0" not in Path("/proc/net/dev").read_text():
        time.sleep(0.05)
    sh(f"ip addr add {SERVERS[name]}/24 dev eth0")
    sh("ip link set eth0 up")
    file(1), file(2)  # which takes longer than they do on their way
    hello = msgspec.structs.replace(HELLO, server=f"{name}:1")
    curve = CurveKeys(folder / f"{name}.key_secret", folder / "trainer.key")
    link = Link(f"tcp://{trainer}:{PORT}", READS_TO_SERVER, hello.server, curve)
    receiver = Receiver(link, hello, folder / name)

    def told(what: object) -> None:
        if isinstance(what, DrafterUpdate):
            assert what.version is not None
            assert holds(what.path, file(what.version))
            print(what.version, flush=True)  # noqa: T201

    receiver.told = told
    asyncio.run(receiver.run())


def main(folder: Path) -> None:
    """On the trainer's host, which routes nothing from one network to the other."""
    sh("ip link set lo up")
    for number in (7, 8):
        sh(f"ip link add br{number} type bridge")
        sh(f"ip addr add 10.7{number}.0.1/24 dev br{number}")
        sh(f"ip link set br{number} up")
    (folder / "known").mkdir()
    for name in ("trainer", *SERVERS):
        zmq.auth.create_certificates(folder, name)
        (folder / f"{name}.key_secret").chmod(0o600)
    for name in SERVERS:
        (folder / f"{name}.key").rename(folder / "known" / f"{name}.key")
    curve = CurveKeys(folder / "trainer.key_secret", folder / "known")
    link = CountingLink(f"tcp://0.0.0.0:{PORT}", READS_TO_TRAINER, curve=curve)
    sender = Sender(link, MODEL, lambda *_: None, chunk_bytes=CHUNK, pays=0)
    thread = threading.Thread(target=sender.run)
    thread.start()
    hosts: list[Host] = []
    try:
        for name in SERVERS:
            until(lambda: len(doors(sender)) == len(hosts) or len(hosts) < 3)
            hosts.append(Host(name, folder))
        until(lambda: doors(sender) == set(SERVERS.values()))
        for version in (1, 2):
            before = link.sent
            sender.publish(version, 0, file(version))
            until(lambda version=version: all(version in host.versions for host in hosts))  # type: ignore[misc]
            assert link.sent - before < 4.5 * len(file(version))  # one gets it from another, three in the first round
            assert b"apart:1" in {peer.rpartition(b"/")[0] for peer in sender._tree._doubted}
    finally:
        for host in hosts:
            host.process.kill()
            host.process.wait()
        sender.stop()
        thread.join()
    print("all arrived")  # noqa: T201


def doors(sender: Sender) -> set[str]:
    """Where those are that servers have opened."""
    found = [member.door for member in list(sender._tree.members.values()) if member.door]
    return {door.removeprefix("tcp://").partition(":")[0] for door in found}


if __name__ == "__main__":
    if len(sys.argv) > 2:
        serve(Path(sys.argv[1]), *sys.argv[2:])
    else:
        main(Path(sys.argv[1]))
