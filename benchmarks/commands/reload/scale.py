"""How long until 64 servers have a new target, or a new drafter, and what of it is on the trainer's link? Simulated.

    python -m benchmarks scale --json benchmarks/results/scale.cpu2.json

Measured here: what a sender's one thread gets out to several receivers, verified at their ends, over the loopback. The
rest is links: each host sends and receives at its link's rate, chunk by chunk, one after the other; a disk that all
share has a rate of its own, and a host reads a checkpoint once. Needs neither a GPU nor a model.

star: the trainer sends to each server. tree: servers pass on what they have, to two others each. ring: NCCL's
broadcast, in which every rank passes each chunk to one other. disk: the trainer writes, and each host reads. keeper:
the trainer sends to one rank, which writes, and each host reads.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tlt_client import DrafterUpdate

from benchmarks.lib.command import out, run
from benchmarks.lib.fleet.spread import Target, by_disk, by_keeper, by_ring, spread
from benchmarks.lib.tables import origin, table
from tlt_server.results import Figures, Result, measured_here
from tlt_server.wire.messages import READS_TO_SERVER, READS_TO_TRAINER, Hello, ModelIdentity
from tlt_server.wire.server import Receiver
from tlt_server.wire.sockets import Link
from tlt_server.wire.trainer import Sender

MEASURES = ("tlt_server/wire", "benchmarks/lib/fleet/spread.py")
REPLICAS, RECEIVERS = 64, 4
LINKS = {"25g": 3.1e9, "100g": 12.5e9, "400g": 50e9}
"""Bytes a second of a host's link, each way."""
DISK = 10e9
"""Likewise of a disk that all share, reads and writes together: a small parallel file system."""
TARGETS = {"7b": Target(15.2e9, hosts=8), "32b": Target(65.5e9, hosts=32)}
"""In bfloat16; eight servers of one GPU on a host, or two of four."""
DRAFTERS = {"500m": 0.5e9, "1g": 1e9, "2g": 2e9}
MODEL = ModelIdentity("Qwen2ForCausalLM", 3584, 152064)


def receive(address: str, number: int, folder: str, got: Any) -> None:
    """A server's end, until it has a drafter."""
    hello = Hello(
        server=f"host{number}:30000", model=MODEL, target_version=0, weight_version="0", drafter_version=0,
        newest_drafter=0,
    )  # fmt: skip
    receiver = Receiver(Link(address, READS_TO_SERVER, hello.server), hello, Path(folder) / str(number))

    async def until() -> None:
        running = asyncio.ensure_future(receiver.run())

        def told(what: object) -> None:
            if isinstance(what, DrafterUpdate):
                got.put(time.monotonic())
                running.cancel()

        receiver.told = told
        await asyncio.gather(running, return_exceptions=True)

    try:
        asyncio.run(until())
    finally:
        receiver.close()


def sent_bytes_s(receivers: int, megabytes: int) -> float:
    """Bytes a second that leave a sender, to so many receivers at once."""
    file, heard = bytes(megabytes << 20), threading.Semaphore(0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        address, got = f"ipc://{folder}/control", multiprocessing.get_context("spawn").Queue()
        sender = Sender(Link(address, READS_TO_TRAINER), MODEL, lambda *_: heard.release())
        thread = threading.Thread(target=sender.run)
        thread.start()
        processes = [
            multiprocessing.get_context("spawn").Process(target=receive, args=(address, number, folder, got))
            for number in range(receivers)
        ]
        try:
            for process in processes:
                process.start()
            for _ in processes:
                if not heard.acquire(timeout=60):
                    raise TimeoutError("a receiver does not come")
            began = time.monotonic()
            sender.publish(1, 0, file)
            ended = max(got.get(timeout=300) for _ in processes)
        finally:
            sender.stop()
            thread.join()
            for process in processes:
                process.kill()
                process.join()
    return receivers * len(file) / (ended - began)


def measure(smoke: bool) -> Figures:
    found: Figures = {"replicas": REPLICAS, "sender_mb_s": sent_bytes_s(RECEIVERS, 32 if smoke else 256) / 1e6}
    for link, rate in LINKS.items():
        sending = min(rate, 1e6 * found["sender_mb_s"])
        for name, size in DRAFTERS.items():
            for way, fan_out in (("star", REPLICAS), ("tree", 2)):
                how = spread(size, REPLICAS, fan_out, sending)
                found[f"drafter_{name}_{way}_{link}_s"] = how.seconds
                found[f"drafter_{name}_{way}_{link}_trainer_gb"] = how.from_root / 1e9
        for name, target in TARGETS.items():
            for way, how in (
                ("ring", by_ring(target, rate)),
                ("disk", by_disk(target, rate, DISK)),
                ("keeper", by_keeper(target, rate, DISK)),
                ("tree", spread(target.size, target.hosts, 2, rate)),
            ):
                found[f"target_{name}_{way}_{link}_s"] = how.seconds
                found[f"target_{name}_{way}_{link}_trainer_s"] = how.root_busy_s
    return found


def as_table(result: Result) -> str:
    """Seconds by link; of a target, those that the trainer's link is busy in brackets."""
    found = result.figures
    rows = [
        [f"drafter {name}, {way}", *(f"{found[f'drafter_{name}_{way}_{link}_s']:.1f}" for link in LINKS)]
        for name in DRAFTERS
        for way in ("star", "tree")
    ] + [
        [
            f"target {name}, {way}",
            *(
                f"{found[f'target_{name}_{way}_{link}_s']:.1f} ({found[f'target_{name}_{way}_{link}_trainer_s']:.1f})"
                for link in LINKS
            ),
        ]
        for name in TARGETS
        for way in ("ring", "disk", "keeper", "tree")
    ]
    said = f"A sender's thread gets out {found['sender_mb_s']:,.0f} MB/s."
    return "\n\n".join((origin(result), said, table(["seconds (of them the trainer's)", *LINKS], rows)))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a smaller file")
    parser.add_argument("--json", type=Path, help="keep the result here")
    arguments = parser.parse_args(argv)

    def measured() -> Result:
        made = measured_here("scale", ["python", "-m", "benchmarks", "scale", *argv], measure(arguments.smoke))
        out.print(as_table(made))
        return made

    run("scale", arguments, measured)
