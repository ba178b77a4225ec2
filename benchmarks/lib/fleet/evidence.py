"""What stand-ins logged, held against what a fleet promises: counted from what they sampled, and when."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Published(NamedTuple):
    """A publication, as its trainer saw it: from its first call to the answer to its last. Seconds, monotonic."""

    version: str
    began: float
    ended: float


class Begin(NamedTuple):
    """A member began to sample a request."""

    t: float
    rid: str
    version: str
    pid: int


Line = dict[str, Any]


def read(folder: Path) -> list[Line]:
    """All logs' lines, in order of time."""
    lines = []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # a kill may cut the last one
                lines.append(json.loads(line))
    return sorted(lines, key=lambda line: line["t"])


def begins(lines: Iterable[Line]) -> list[Begin]:
    return [Begin(line["t"], line["rid"], line["version"], line["pid"]) for line in lines if line["event"] == "begin"]


def gone(lines: Iterable[Line]) -> dict[int, float]:
    """From when on a process sampled nothing any more: by process id."""
    return {line["pid"]: line["t"] for line in lines if line["event"] == "fault" and line["deed"] in ("kill", "stop")}


def sampled_twice(found: Sequence[Begin], gone: dict[int, float]) -> int:
    """Requests that a member began though another one that had begun them was neither dead nor stopped."""
    by_rid: dict[str, list[Begin]] = defaultdict(list)
    for begin in found:
        by_rid[begin.rid].append(begin)
    return sum(
        any(gone.get(first.pid, float("inf")) > later.t for first in each[:index])
        for each in by_rid.values()
        for index, later in enumerate(each)
    )


def stale_served(found: Iterable[Begin], published: Sequence[Published]) -> int:
    """Requests sampled by weights older than those whose publication had been acknowledged, or newer than any that
    had begun."""
    number = {each.version: index for index, each in enumerate(published)}
    stale = 0
    for begin in found:
        mine = number.get(begin.version, -1)
        acknowledged = sum(each.ended < begin.t for each in published) - 1
        begun = sum(each.began < begin.t for each in published) - 1
        stale += not acknowledged <= mine <= begun
    return stale


def torn(found: Sequence[Begin], published: Sequence[Published]) -> int:
    """How often older weights sampled after newer ones had, on any member."""
    number = {each.version: index for index, each in enumerate(published)}
    newest, count = -1, 0
    for begin in sorted(found):
        mine = number.get(begin.version, -1)
        count += mine < newest
        newest = max(newest, mine)
    return count
