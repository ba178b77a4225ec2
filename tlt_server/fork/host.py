"""Which machines the fork runs on: those that SGLang has a wheel with compiled parts for."""

import os
import platform
import re
import sys
from dataclasses import dataclass

from tlt_server.errors import ForkError
from tlt_server.fork.pristine import SGLANG

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
