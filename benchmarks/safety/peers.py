"""Peers that mean harm, against a trainer's process and a server's end of the link: they end and stall neither."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from benchmarks.safety import hostile
from tests.trainer.stand_in import Running, Server, until
from tests.wire.ends import HELLO, Script
from tests.wire.ends import Server as Receiving
from tlt_server.results import Figures

BATCHES = 10
OF_A_PEER = 100
"""Messages, before it comes again under another name."""
KNOCKS = 40
"""Connections a batch that are no peer's, open together; each counts as a message."""
ANSWER_S = 5.0


def measure(count: int, seed: int, logs: Path) -> Figures:
    """`peer_messages`: sent, nine of ten to a trainer's process, the others to a server's receiver.
    `trainer_ended`, `trainer_stalled`: batches after which it had ended, or did not answer its server and its status
    within 5 s; a receiver that ended counts as the former, one that does not hear its trainer as the latter.
    `peer_memory_growth`: of the trainer's resident memory, after the first batch and after all: a ratio less 1.
    """
    draw = random.Random(seed)
    to_server = count // 10
    figures = _against_trainer(count - to_server, draw, logs)
    ended, stalled = _against_server(to_server, draw, logs)
    figures["peer_messages"] += to_server
    figures["trainer_ended"] += ended
    figures["trainer_stalled"] += stalled
    return figures


def _against_trainer(count: int, draw: random.Random, logs: Path) -> Figures:
    trainer = Running(logs / "trainer", tcp=True)
    sent = ended = stalled = 0
    memory: list[int] = []
    with Server(logs / "one", trainer.control, trainer.features) as server, trainer.process() as process:
        until(lambda: trainer.status().get("frozen") == 0, "the trainer does not start")
        for batch in range(BATCHES):
            wanted = count * (batch + 1) // BATCHES - sent
            sent += _send_batch(trainer, wanted, draw)
            if process.poll() is not None:
                ended += 1
                break
            stalled += not _answers(trainer, server)
            memory.append(_resident(process.pid))
    growth = memory[-1] / memory[0] - 1 if memory else 0.0
    return {
        "peer_messages": sent,
        "trainer_ended": ended,
        "trainer_stalled": stalled,
        "peer_memory_growth": round(growth, 4),
    }


def _send_batch(trainer: Running, count: int, draw: random.Random) -> int:
    control, features = (int(address.rpartition(":")[2]) for address in (trainer.control, trainer.features))
    knocks = min(KNOCKS, count // 10)
    with contextlib.ExitStack() as stack:
        for _ in range(knocks):
            for line in hostile.knock(draw.choice((control, features)), draw):
                stack.enter_context(line)
        done = knocks
        with zmq.Context() as context:
            while done < count:
                done += _send_as_peer(context, trainer, min(OF_A_PEER, count - done), draw)
    return done


def _send_as_peer(context: "zmq.Context[zmq.Socket[bytes]]", trainer: Running, count: int, draw: random.Random) -> int:
    """By a socket of either link; one that is cut connects again by itself."""
    to_control = draw.random() < 0.7
    with context.socket(zmq.DEALER if to_control else zmq.PUSH) as peer:
        peer.linger, peer.sndtimeo = 1000, int(ANSWER_S * 1000)
        if to_control and draw.random() < 0.7:
            peer.routing_id = (
                draw.choice((b"two:2/", b"one:1/", b"", draw.randbytes(9))) + draw.randbytes(4).hex().encode()
            )
        peer.connect(trainer.control if to_control else trainer.features)
        for _ in range(count):
            with contextlib.suppress(zmq.Again):  # it does not read: that is seen after the batch
                peer.send_multipart(hostile.control(draw) if to_control else hostile.features(draw))
    return count


def _answers(trainer: Running, server: Server) -> bool:
    """Whether its status comes, and its server is connected, within the time."""
    until_s = time.monotonic() + ANSWER_S
    while time.monotonic() < until_s:
        if trainer.status() and server.link.connected:
            return True
        time.sleep(0.05)
    return False


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def _against_server(count: int, draw: random.Random, logs: Path) -> tuple[int, int]:
    """Times that a receiver ended, or was not there any more for a trainer that behaves."""
    script = Script()
    server = Receiving(script.link.address, logs / "drafters", HELLO)
    ended = stalled = 0
    try:
        with _stepping(server) as failed:
            socket = script.link._socket  # a link sends nothing that is malformed
            until(lambda: script.step() or script.take(type(HELLO)), "the receiver says no hello")
            for _ in range(count):
                socket.send_multipart([script.peer, *hostile.control(draw)])
                script.step()
            began = server.link.rejected.total()
            script.step()
            stalled += not _says_hello(script) or not began
        ended += bool(failed)
    finally:
        server.close()
        script.close()
    return ended, stalled


def _says_hello(script: Script) -> bool:
    until_s = time.monotonic() + ANSWER_S
    script.take(type(HELLO))
    while time.monotonic() < until_s:
        script.step()
        if script.take(type(HELLO)):
            return True
    return False


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
