"""Which program installs packages here: the interpreter's own pip, or uv where the environment has no pip."""

import shutil
import subprocess
from pathlib import Path

from tlt_server.errors import ForkError


def download_command(python: Path) -> list[str]:
    """The start of a `pip download`, with the user's own pip configuration. uv has no download: it runs a pip."""
    if has_pip(python):
        return [str(python), "-m", "pip", "download"]
    return [find_uv(python), "tool", "run", "--python", str(python), "pip", "download"]


def install_command(python: Path) -> list[str]:
    """The start of a command that installs packages into the environment of `python`."""
    if has_pip(python):
        return [str(python), "-m", "pip", "install"]
    return [find_uv(python), "pip", "install", "--python", str(python)]


def reinstall_options(command: list[str]) -> list[str]:
    """Options by which an `install_command` installs again, afresh, a version that is there already.

    uv links installed files to those of its cache, so that whoever edits the one may have edited the other.
    """
    return ["--force-reinstall"] if command[1] == "-m" else ["--reinstall", "--no-cache"]


def has_pip(python: Path) -> bool:
    """Whether `python -m pip` works."""
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def find_uv(python: Path) -> str:
    """uv, from PATH or from beside `python`. Raises ForkError where there is none."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(python.parent))
    if uv is None:
        raise ForkError(f"{python} has no pip and there is no uv on PATH: run `{python} -m ensurepip`, or install uv")
    return uv
