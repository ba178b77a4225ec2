"""Peers that mean harm, against a trainer's process and a server's end of the link: they end and stall neither."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import httpx
import zmq

from benchmarks.lib.safety import hostile
from tests.trainer.stand_in import Running, Server, until
from tests.wire.ends import HELLO, Script
from tests.wire.ends import Server as Receiving
from tlt_server.results import Figures
from tlt_server.wire.connections import FREED_AFTER

BATCHES = 10
PEERS, OF_A_PEER = 8, 64
"""At once, and messages of each, before they come again under other names."""
KNOCKS = 40
"""Connections a batch that are no peer's, open together; they count as nothing."""
ENDLESS_KNOCKS = 3
"""Of them, with a message without end."""
ANSWER_S, QUIET_S = 5.0, 0.3
"""Seconds: until an answer; without a message read, until what was sent and is not counted was taken otherwise."""


def measure(count: int, seed: int, logs: Path) -> Figures:
    """`peer_messages`: that were read and refused or ignored, by the counters of those who read: nine of ten of a
    trainer's process, the others of a server's receiver. A peer may pass for a server: what is heard of it then is not
    among them.
    `trainer_ended`, `trainer_stalled`: batches after which it had ended, or did not answer its server and its status
    within 5 s; a receiver that ended counts as the former, one that does not hear its trainer as the latter.
    `peer_memory_growth`: of the trainer's resident memory, after the first batch and after all: a ratio less 1.
    """
    draw = random.Random(seed)
    to_server = count // 10
    figures = _against_trainer(count - to_server, draw, logs)
    read, ended, stalled = _against_server(to_server, draw, logs)
    figures["peer_messages"] += read
    figures["trainer_ended"] += ended
    figures["trainer_stalled"] += stalled
    return figures


class _Attacked:
    """A trainer as its attackers see it."""

    def __init__(self, trainer: Running, process: "Popen[bytes]", http: httpx.Client) -> None:
        self._trainer, self._process, self._http = trainer, process, http

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def taken(self) -> int:
        """Hostile messages until now; -1 while it does not answer."""
        try:
            status = self._http.get(f"http://127.0.0.1:{self._trainer.port}/tlt/v1/train/status").json()
        except httpx.TransportError:
            return -1
        return int(status["control_dropped"] + status["feature_messages"])

    def answers(self, server: Server) -> bool:
        """Whether its status comes, and its server is connected, within the time."""
        return _within(ANSWER_S, lambda: self.taken() >= 0 and server.link.connected)

    def knock(self, draw: random.Random, knocks: int) -> None:
        ports = [int(address.rpartition(":")[2]) for address in (self._trainer.control, self._trainer.features)]
        with contextlib.ExitStack() as stack:
            for number in range(knocks):
                line = hostile.knock(draw.choice(ports), draw, endless=number < ENDLESS_KNOCKS)
                stack.enter_context(line)

    def send(self, draw: random.Random, count: int) -> bool:
        """By several peers, who stay until all is read that will be; whether any was."""
        before = newest = self.taken()
        with zmq.Context() as context, contextlib.ExitStack() as stack:
            for start in range(0, count, OF_A_PEER):
                self._send(stack.enter_context(_peer(context, draw)), draw, min(OF_A_PEER, count - start))
            until_s = time.monotonic() + ANSWER_S
            while newest < before + count and time.monotonic() < until_s:
                time.sleep(0.02)
                if (now := self.taken()) > newest:
                    newest, until_s = now, time.monotonic() + QUIET_S
        return newest > before

    def _send(self, peer: "zmq.Socket[bytes]", draw: random.Random, count: int) -> None:
        is_control = peer.type == zmq.DEALER
        peer.connect(self._trainer.control if is_control else self._trainer.features)
        for _ in range(count):
            with contextlib.suppress(zmq.Again):  # it does not read: that is seen by its counters
                peer.send_multipart(hostile.control(draw) if is_control else hostile.features(draw))


def _peer(context: "zmq.Context[zmq.Socket[bytes]]", draw: random.Random) -> "zmq.Socket[bytes]":
    """For either link; one that is cut connects again by itself."""
    peer = context.socket(zmq.DEALER if draw.random() < 0.7 else zmq.PUSH)
    peer.linger, peer.sndtimeo = 0, int(ANSWER_S * 1000)
    if peer.type == zmq.DEALER and draw.random() < 0.7:
        name = draw.choice((b"two:2/", b"one:1/", b"", draw.randbytes(9)))
        peer.routing_id = name + draw.randbytes(4).hex().encode()
    return peer


def _against_trainer(count: int, draw: random.Random, logs: Path) -> Figures:
    trainer = Running(logs / "trainer", tcp="127.0.0.1")
    taken = ended = stalled = 0
    memory: list[int] = []
    with (
        Server(logs / "one", trainer.control, trainer.features) as server,
        trainer.process() as process,
        httpx.Client(timeout=ANSWER_S) as http,
    ):
        until(lambda: trainer.status().get("frozen") == 0, "the trainer does not start")
        attacked = _Attacked(trainer, process, http)
        for batch in range(BATCHES):
            wanted = count * (batch + 1) // BATCHES
            attacked.knock(draw, min(KNOCKS, wanted // 10))
            while taken < wanted and attacked.send(draw, min(wanted - taken, PEERS * OF_A_PEER)):
                taken = attacked.taken()
            ended += attacked.has_ended
            if ended:
                break
            stalled += taken < wanted or not attacked.answers(server)
            if batch in {0, BATCHES - 1}:
                memory.append(_resident_at_rest(process.pid))
    growth = memory[-1] / memory[0] - 1 if memory else 0.0
    return {
        "peer_messages": taken,
        "trainer_ended": ended,
        "trainer_stalled": stalled,
        "peer_memory_growth": round(growth, 4),
    }


def _within(seconds: float, done: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + seconds
    while not (is_done := done()) and time.monotonic() < until_s:
        time.sleep(0.02)
    return is_done


def _resident_at_rest(pid: int) -> int:
    """KiB, once what connections that are gone had taken is given back."""
    time.sleep(2 * FREED_AFTER)
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def _against_server(count: int, draw: random.Random, logs: Path) -> tuple[int, int, int]:
    """Messages that a receiver read; times that it ended, or was not there any more for a trainer that behaves."""
    script = Script()
    server = Receiving(script.link.address, logs / "drafters", HELLO)
    stalled = 0
    try:
        with _stepping(server) as failed:
            until(lambda: script.step() or script.take(type(HELLO)), "the receiver says no hello")
            began = server.link.read
            while not failed and not stalled and (left := count - (server.link.read - began)) > 0:
                stalled += not _sent(script, server, draw, min(left, OF_A_PEER))
            read = server.link.read - began
            stalled += not failed and not _says_hello(script)
        return read, len(failed), stalled
    finally:
        server.close()
        script.close()


def _sent(script: Script, server: Receiving, draw: random.Random, count: int) -> bool:
    """Whether so many messages were sent and read."""
    before, socket = server.link.read, script.link._socket  # a link sends nothing that is malformed
    for _ in range(count):
        socket.send_multipart([script.peer, *hostile.control(draw)])
        script.step()
    return _within(ANSWER_S, lambda: script.step() or server.link.read >= before + count)


def _says_hello(script: Script) -> bool:
    script.take(type(HELLO))
    return _within(ANSWER_S, lambda: script.step() or bool(script.take(type(HELLO))))


@contextlib.contextmanager
def _stepping(server: Receiving) -> Iterator[list[BaseException]]:
    """A thread that steps it; what it ended by, if it did."""
    over, failed = threading.Event(), []

    def step() -> None:
        try:
            while not over.is_set():
                server.step()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is what is counted
            failed.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    try:
        yield failed
    finally:
        over.set()
        thread.join()
