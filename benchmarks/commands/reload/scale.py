"""How long until 64 servers have a new target, or a new drafter, and what of it is on the trainer's link? Simulated.

    python -m benchmarks scale --json benchmarks/results/scale.cpu2.json

Measured here: what a sender's one thread gets out to several receivers, verified at their ends, over this machine's
sockets, plain and encrypted as between hosts; and how a drafter gets to eight receivers, by the star and by the tree
that servers make of it: seconds, which the cores that all share hold, and bytes that leave the trainer. The
rest is links: each host sends and receives at its link's rate, chunk by chunk, one after the other; a disk that all
share has a rate of its own, and a host reads a checkpoint once. Needs neither a GPU nor a model.

star: the trainer sends to each server. tree: servers pass on what they have, to two others each. ring: NCCL's
broadcast, in which every rank passes each chunk to one other. disk: the trainer writes, and each host reads. keeper:
the trainer sends to one rank, which writes, and each host reads.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.command import out, run
from benchmarks.lib.fleet.receivers import sent
from benchmarks.lib.fleet.spread import Target, by_disk, by_keeper, by_ring, spread
from benchmarks.lib.tables import origin, table
from tlt_server.results import Figures, Result, measured_here
from tlt_server.wire.tree import FAN_OUT

MEASURES = ("tlt_server/wire", "benchmarks/lib/fleet/spread.py", "benchmarks/lib/fleet/receivers.py")
REPLICAS, RECEIVERS, REAL = 64, 4, 8
WAYS = {"star": 0, "tree": FAN_OUT}
"""Of real drafters; fan-outs."""
LINKS = {"25g": 3.1e9, "100g": 12.5e9, "400g": 50e9}
"""Bytes a second of a host's link, each way."""
DISK = 10e9
"""Likewise of a disk that all share, reads and writes together: a small parallel file system."""
TARGETS = {"7b": Target(15.2e9, hosts=8), "32b": Target(65.5e9, hosts=32)}
"""In bfloat16; eight servers of one GPU on a host, or two of four."""
DRAFTERS = {"500m": 0.5e9, "1g": 1e9, "2g": 2e9}


def measure(smoke: bool) -> Figures:
    size = (32 if smoke else 256) << 20
    found: Figures = {"replicas": REPLICAS, "real_receivers": REAL, "real_mb": size / 1e6}
    for name, encrypted in (("sender_mb_s", False), ("sender_encrypted_mb_s", True)):
        found[name] = RECEIVERS * size / 1e6 / sent(RECEIVERS, size, 0, encrypted=encrypted).seconds
    for way, fan_out in WAYS.items():
        found[f"real_{way}_s"], from_trainer = sent(REAL, size, fan_out)
        found[f"real_{way}_trainer_mb"] = from_trainer / 1e6
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
    said = (
        f"A sender's thread gets out {found['sender_mb_s']:,.0f} MB/s, encrypted {found['sender_encrypted_mb_s']:,.0f}."
    )
    real = [[way, f"{found[f'real_{way}_s']:.1f}", f"{found[f'real_{way}_trainer_mb']:,.0f}"] for way in WAYS]
    columns = [f"{found['real_mb']:,.0f} MB to {found['real_receivers']} receivers here", "s", "MB from the trainer"]
    return "\n\n".join(
        (origin(result), said, table(columns, real), table(["seconds (of them the trainer's)", *LINKS], rows))
    )


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
