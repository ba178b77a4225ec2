"""Which kept results are older than what they measure: git says what has changed since their revision."""

import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from benchmarks.lib.project.catalogue import commands
from benchmarks.lib.tables import RESULTS
from tlt_server import results

TOP = RESULTS.parents[1]
ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "demo": ("tlt_server/demo", "tlt_server/trainer", "tlt_server/engine/weights"),
    "faults": ("tlt_server/trainer", "tlt_server/link", "tlt_server/wire", "tlt_server/engine/weights"),
}
"""What results measure that other commands make."""


def changed_since(revision: str, top: Path = TOP) -> dict[str, int] | None:
    """Lines added and removed by file, imports not counted and renames followed.

    None where git cannot say: no history here, or none that has this revision.
    """
    words = ["git", "-C", str(top), "diff", "-z", "-M", "--numstat", r"--ignore-matching-lines=^ *(from|import) "]
    try:
        ended = subprocess.run([*words, revision.removesuffix("+"), "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    found, fields = {}, iter(ended.stdout.split("\0"))
    for field in fields:
        if not field:
            continue
        added, removed, path = field.split("\t")
        path = path or [next(fields), next(fields)][1]  # renamed: two names follow
        found[path] = sum(int(count) for count in (added, removed) if count != "-")
    return {path: count for path, count in found.items() if count}


def age_of(changed: Mapping[str, int] | None, measures: Sequence[str]) -> str:
    """In words: nothing for a result that is as new as what it measures. changed: since its revision."""
    if changed is None:
        return "unknown"
    of_these = {path: count for path, count in changed.items() if path.startswith(tuple(f"{m}/" for m in measures))}
    return f"{sum(of_these.values())} lines of {len(of_these)} files have changed since" if of_these else ""


def ages(folder: Path = RESULTS) -> dict[str, str]:
    """Of each kept result, how it is older than what it measures; `no such command` where nothing makes it any more."""
    measures = {name: command.measures for name, command in commands().items()} | ELSEWHERE
    changed = cache(changed_since)  # one revision has several results
    found = {}
    for path in sorted(folder.glob("*.json")):
        result = results.read(path)
        known = measures.get(result.name)
        found[path.stem] = age_of(changed(result.revision), known) if known is not None else "no such command"
    return found
