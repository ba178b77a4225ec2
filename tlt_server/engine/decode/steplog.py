"""When each step was settled and what it gave, line by line in a file: for measurements, and off unless asked for."""

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tlt_server.strategy.arms import Choice


class SettledStep(msgspec.Struct, frozen=True, array_like=True):
    """One line.

    settled: when its tokens were on the CPU, in seconds of the monotonic clock, which a machine's processes share.
    decode: whether it was a decode step, and not a prefill.
    drafter_version: of the drafter that it was launched with; None where there is none.
    tokens: how many it gave each live request, by rid.
    arm: that a decode step speculated with; None: none.
    """

    settled: float
    decode: bool
    drafter_version: int | None
    tokens: dict[str, int]
    arm: Choice = None


class StepLog:
    """Appends to a file; each line is one write, so that a reader finds whole lines and replicas may share the file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def note(self, decode: bool, drafter_version: int | None, tokens: Mapping[str, int], arm: Choice = None) -> None:
        """A step, settled now."""
        step = SettledStep(time.monotonic(), decode, drafter_version, dict(tokens), arm)
        self._file.write(msgspec.json.encode(step) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_steps(path: Path, since: int = 0) -> list[SettledStep]:
    """The steps after a log's first `since` bytes, in order."""
    decoder = msgspec.json.Decoder(SettledStep)
    with path.open("rb") as lines:
        lines.seek(since)
        return [decoder.decode(line) for line in lines if line.endswith(b"\n")]
