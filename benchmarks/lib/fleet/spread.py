"""How long bytes take to many hosts, over links of a rate, chunk by chunk."""

from typing import NamedTuple

CHUNK = 4e6
"""Bytes, of what is passed on as soon as it is there."""


class Target(NamedTuple):
    """size: bytes of a checkpoint. hosts: that servers are on."""

    size: float
    hosts: int


class Spread(NamedTuple):
    """seconds: until the last has all. root_busy_s: until the trainer's link is free. from_root: bytes over it."""

    seconds: float
    root_busy_s: float
    from_root: float


def spread(size: float, receivers: int, fan_out: int, rate: float) -> Spread:
    """From one host to each of many: it sends to `fan_out` of them, and each of those to as many others.

    A host sends one chunk at a time, each to its receivers in turn; it has a chunk before it passes it on.
    """
    chunks, took = max(1, round(size / CHUNK)), min(size, CHUNK) / rate
    arrived = [[0.0] * chunks]
    busy = 0.0
    for parent in range(receivers + 1):
        below = range(parent * fan_out + 1, min((parent + 1) * fan_out, receivers) + 1)
        if not below:
            break
        here = [[0.0] * chunks for _ in below]
        free = 0.0
        for chunk in range(chunks):
            for child in here:
                free = max(free, arrived[parent][chunk]) + took
                child[chunk] = free
        arrived += here
        busy = free if parent == 0 else busy
    return Spread(max(times[-1] for times in arrived), busy, min(fan_out, receivers) * size)


def by_ring(target: Target, rate: float) -> Spread:
    """NCCL's broadcast over hosts: each passes a chunk to the next. The trainer waits for the last."""
    seconds = spread(target.size, target.hosts, 1, rate).seconds
    return Spread(seconds, seconds, target.size)


def by_disk(target: Target, rate: float, disk: float) -> Spread:
    """The trainer writes, then waits until each host has read."""
    write = target.size / min(rate, disk)
    read = max(target.size / rate, target.hosts * target.size / disk)
    return Spread(write + read, write + read, target.size)


def by_keeper(target: Target, rate: float, disk: float) -> Spread:
    """Like `by_disk`, behind a receiver that writes while it receives; the trainer is free to compute once all of it
    is there, but for the call that ends the publication."""
    return by_disk(target, rate, disk)._replace(root_busy_s=target.size / min(rate, disk))
