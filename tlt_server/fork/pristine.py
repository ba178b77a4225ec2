"""The pristine wheel: which one we patch, how it is known, where it comes from."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tlt_server.errors import ForkError
from tlt_server.fork.environment import download_command
from tlt_server.fork.series import sha256

PLATFORM = "manylinux_2_34_x86_64"


@dataclass(frozen=True)
class Release:
    """A release of SGLang: its version, and the sha256 of its wheel for each Python version that we support."""

    version: str
    wheels: Mapping[str, str] = field(hash=False)

    def wheel_name(self, python: str, version: str | None = None) -> str:
        """File name of the wheel for `python` ("3.11"), of this version or of another one."""
        tag = "cp" + python.replace(".", "")
        return f"sglang-{version or self.version}-{tag}-{tag}-{PLATFORM}.whl"


SGLANG = Release(
    "0.5.17",
    {
        "3.11": "575e38f5683624ded3b4bb267f637a098e5ed37d13a1d1ff5ea09bd781a04d16",
        "3.12": "fb4cba478a5dca5ee146550b39f33add1c4e475d21ee11810b86ed1c58068093",
    },
)


def fetch(release: Release, python: str | None, wheel: Path | None, scratch: Path) -> Path:
    """The verified pristine wheel for `python`: `wheel` where one is named, else downloaded into `scratch`.

    With `python` None any wheel of the release will do. Raises ForkError for a wheel that is not there, cannot be
    downloaded, or is another one.
    """
    found = wheel or _download(release, python or next(iter(release.wheels)), scratch)
    if not found.is_file():
        raise ForkError(f"{found} is not a file: name the pristine wheel of SGLang {release.version}")
    expected = [release.wheels[python]] if python else list(release.wheels.values())
    digest = sha256(found.read_bytes())
    if digest not in expected:
        what = f"of SGLang {release.version}" + (f" for Python {python}" if python else "")
        raise ForkError(
            f"{found} has sha256 {digest}, but the pristine wheel {what} has {' or '.join(expected)}: get that one"
            f" with `pip download --no-deps sglang=={release.version}`"
        )
    return found


def _download(release: Release, python: str, scratch: Path) -> Path:
    command = [
        *download_command(Path(sys.executable)),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(scratch)),
        *("--python-version", python, "--implementation", "cp", "--abi", "cp" + python.replace(".", "")),
        *("--platform", PLATFORM),
        # `==` would also take one of our own forks, where pip can see one.
        f"sglang==={release.version}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ForkError(
            f"could not download the pristine wheel of SGLang {release.version} for Python {python}: name a local copy"
            f" with --wheel. `{' '.join(command)}` said:\n{done.stderr.strip()}"
        )
    return scratch / release.wheel_name(python)


MIN_GLIBC = (2, 34)


@dataclass(frozen=True)
class Host:
    """What decides whether a wheel fits a machine. `libc` is e.g. "glibc 2.36", or "" where it is another one."""

    system: str
    machine: str
    libc: str

    @staticmethod
    def here() -> "Host":
        named = "CS_GNU_LIBC_VERSION" in os.confstr_names
        return Host(platform.system(), platform.machine(), (os.confstr("CS_GNU_LIBC_VERSION") or "") if named else "")


def this_python() -> str:
    """Version of the running interpreter, e.g. "3.11"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def require_host(host: Host) -> None:
    """Raise ForkError, naming what was found, unless `host` is Linux on x86-64 with a glibc that is new enough."""
    needs = f"SGLang {SGLANG.version} runs on Linux x86-64 with glibc {MIN_GLIBC[0]}.{MIN_GLIBC[1]} or newer"
    if (host.system, host.machine) != ("Linux", "x86_64"):
        raise ForkError(f"this machine is {host.system} {host.machine}: {needs}")
    glibc = re.match(r"glibc (\d+)\.(\d+)", host.libc)
    if glibc is None or (int(glibc[1]), int(glibc[2])) < MIN_GLIBC:
        raise ForkError(f"this machine has {host.libc or 'a C library that is not glibc'}: {needs}")


def require_python(version: str) -> None:
    """Raise ForkError unless there is a wheel for Python `version` ("3.11")."""
    if version not in SGLANG.wheels:
        raise ForkError(f"SGLang {SGLANG.version} is supported on Python {' and '.join(SGLANG.wheels)}, not {version}")
