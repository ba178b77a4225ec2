"""What stands in the environment of an interpreter, which need not be the running one."""

import json
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
