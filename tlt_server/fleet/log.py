"""The transaction log: what a front that was killed knows of its fleet. JSON lines, on disk before a call goes out."""

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from tlt_server.errors import ConfigError, DiskFailed
from tlt_server.fleet.transaction import Publication

NAME = "transactions.jsonl"
SAMPLE = 1 << 20
"""Bytes at either end of a file that its checksum is of; a checkpoint may have hundreds of gigabytes."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line. phase: `apply`, before the call goes out; `commit`, once it is over, whatever came of it.

    version, publications, path, checksum: the fleet's, of a commit; those it is to have, of an apply. setting: a call
    that late joiners are told, too: method, path, body.
    """

    number: int
    time: float
    phase: str
    call: str
    members: list[str]
    version: str | None
    publications: int
    model: str = ""
    path: str | None = None
    checksum: str | None = None
    under_way: dict[str, Any] = {}
    setting: tuple[str, str, str] | None = None


class Past(msgspec.Struct):
    """What a log says. doubt: an apply without its commit."""

    number: int = 0
    version: str | None = None
    publications: int = 0
    model: str = ""
    path: str | None = None
    checksum: str | None = None
    under_way: Publication = Publication()
    settings: dict[str, tuple[str, str, str]] = {}
    doubt: Entry | None = None

    def read(self, entry: Entry) -> None:
        """Goes on by a line."""
        self.number = entry.number
        if entry.phase == "apply":
            self.doubt = entry
            return
        self.doubt = None
        self.version, self.publications, self.model = entry.version, entry.publications, entry.model
        self.path, self.checksum = entry.path, entry.checksum
        self.under_way = Publication(**entry.under_way)
        if entry.setting is not None:
            self.settings[f"{entry.setting[0]} {entry.setting[1]}"] = entry.setting


class Log:
    """One file in a folder. DiskFailed: it cannot be written, and so nothing may be changed."""

    def __init__(self, folder: Path) -> None:
        """ConfigError: the folder cannot be made, or what is in it is no log."""
        self.path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self.path.read_bytes().splitlines() if self.path.exists() else []
            self.past = _past(lines, self.path)
            self._file = self.path.open("ab", buffering=0)
            if lines and not self.path.read_bytes().endswith(b"\n"):
                self._file.write(b"\n")  # a line that was cut short stays by itself
        except OSError as error:
            raise ConfigError(f"--state-dir {folder}: {error.strerror}. Name a folder that can be written") from error

    def write(self, entry: Entry) -> None:
        """On disk when it returns."""
        try:
            self._file.write(msgspec.json.encode(entry) + b"\n")
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DiskFailed(
                f"transaction log {self.path}: {error.strerror}; make room, nothing was changed"
            ) from error
        self.past.read(entry)

    def close(self) -> None:
        self._file.close()


def _past(lines: list[bytes], path: Path) -> Past:
    past = Past()
    for number, line in enumerate(lines, start=1):
        try:
            past.read(msgspec.json.decode(line, type=Entry))
        except msgspec.MsgspecError as error:
            if number < len(lines) and not _cut(line):  # a kill, or a full disk, cut a line short, and only that
                raise ConfigError(
                    f"{path}, line {number}: {error}. Move the file away, or name another --state-dir"
                ) from error
    return past


def _cut(line: bytes) -> bool:
    return not line.endswith(b"}")


def checksum(folder: str) -> str | None:
    """Of a checkpoint's files: names, sizes, and both ends of each; None: it is not on a disk that the front sees."""
    top = Path(folder)
    found = hashlib.sha256()
    try:
        files = sorted(path for path in top.rglob("*") if path.is_file()) if top.is_dir() else [top]
        for path in files:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                found.update(f"{path.relative_to(top)} {size}\n".encode())
                found.update(file.read(SAMPLE))
                if size > SAMPLE:
                    file.seek(-min(SAMPLE, size - SAMPLE), os.SEEK_END)
                    found.update(file.read(SAMPLE))
    except OSError:
        return None
    return found.hexdigest()
