"""What stands in the environment of an interpreter, which need not be the running one."""

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tlt_server.errors import ForkError

_PROBE = """
import importlib.metadata, json, sys
path = [entry for entry in sys.path if entry]
found = reversed(list(importlib.metadata.distributions(path=path)))
versions = {each.metadata["Name"]: each.version for each in found}
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "path": path, "versions": versions}))
"""


@dataclass(frozen=True)
class Environment:
    """Canonical names of the distributions that `interpreter` would import -> their versions."""

    interpreter: Path
    python: str  # e.g. "3.11"
    path: list[str]
    versions: Mapping[str, str]

    @staticmethod
    def of(interpreter: Path) -> "Environment":
        """Ask `interpreter` itself; what lies in the working directory is not of it. Raises ForkError if it fails."""
        interpreter = interpreter.absolute()
        try:
            answer = subprocess.run([interpreter, "-c", _PROBE], cwd="/", capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ForkError(f"{interpreter} is not a Python that runs ({error}): name another with --python") from error
        found = json.loads(answer.stdout)
        versions: dict[str, str] = {canonicalize_name(name): version for name, version in found["versions"].items()}
        return Environment(interpreter, found["python"], found["path"], versions)

    def satisfies(self, requirements: Iterable[Requirement]) -> bool:
        """Whether each requirement is met, by itself: what it asks for in turn is not looked at."""
        for each in requirements:
            version = self.versions.get(canonicalize_name(each.name))
            if version is None or not each.specifier.contains(version, prereleases=True):
                return False
        return True


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
    """Options by which an `install_command` installs again, afresh, a version that is there already. uv links installed
    files to those of its cache, so that whoever edits the one may have edited the other."""
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
