"""The one form of every JSON result of this project: what was measured, where, with which versions and revision."""

import contextlib
import datetime
import errno
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from tlt_server.errors import ConfigError, DiskFailed

Figures = dict[str, float | int]
"""Flat names to numbers."""
PACKAGES = ("tlt-server", "sglang", "torch", "transformers", "flashinfer-python", "triton")


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A result of a benchmark or demo.

    date: UTC, ISO 8601, to the second. versions: of the packages that decide the figures; only those installed.
    revision: git's, with `+` where the tree had uncommitted changes; `unknown` outside a checkout and a copy of one.
    figures: flat names to numbers; docs/results defines each, with its unit.
    """

    name: str
    date: str
    machine: str
    versions: dict[str, str]
    revision: str
    argv: list[str]
    figures: Figures


def measured_here(name: str, argv: list[str], figures: Mapping[str, float | int]) -> Result:
    """A result of this machine, now."""
    import torch

    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    gpus = (torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return Result(
        name=name,
        date=now.isoformat(),
        machine=", ".join([platform.machine(), f"{os.cpu_count()} cores", f"{gigabytes:.0f} GB", *gpus]),
        versions=versions,
        revision=git_revision(),
        argv=argv,
        figures=dict(figures),
    )


def require_place(path: Path, flag: str = "--json") -> None:
    """Makes the folder of a result to come. ConfigError: nothing can be written there, known before it is measured."""
    git_revision()  # before logs, or a first round's figures, lie in the checkout
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; name a file in a folder that can be written") from error


def write(result: Result, path: Path) -> None:
    """Writes a result whole or not at all. DiskFailed: not at all."""
    text = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(text)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DiskFailed(f"result {path}: {error.strerror}; make room, or name another file") from error


def read(path: Path) -> Result:
    """A result from its file. ConfigError: it cannot be read, or is not of this form."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise ConfigError(f"result {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"result {path}: not what a benchmark kept by --json ({error})") from error


@cache
def git_revision() -> str:
    """The revision of the checkout that this package lies in; of a copy without .git, what its file REVISION says.

    As it is when first asked: what a run writes into the checkout is no change of what ran.
    """
    top = Path(__file__).parents[1]
    if (top / "REVISION").is_file():
        return (top / "REVISION").read_text().strip()
    git = ["git", "-C", str(top)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if dirty.strip() else "")
