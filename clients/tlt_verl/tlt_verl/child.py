"""`tlt-server serve` as a child process, which ends with this one."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tlt_client import AsyncClient
from verl.utils.device import get_visible_devices_keyword
from verl.utils.net_utils import get_free_port

START_S = 1800.0
"""For a server to load its model."""
_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
"""
"""Runs a module that is sent SIGTERM when its parent is gone: Ray kills actors without a word. Not by `preexec_fn`,
which may deadlock in a process that has threads."""


class ServerEnded(RuntimeError):
    """The child process has ended."""


class Child:
    """One server on a loopback address; its output goes to the file `log`.

    rank: of the replica, which makes the address, and so what verl's load balancer calls the replica, its own.
    """

    def __init__(self, flags: Sequence[str], rank: int, visible_devices: str) -> None:
        self.host = f"127.0.{rank // 250 % 250}.{1 + rank % 250}"
        self.port, _ = get_free_port(self.host)
        file, name = tempfile.mkstemp(prefix=f"tlt-server-{rank}-", suffix=".log")
        self.log = Path(name)
        serve = ["tlt_server", "serve", "--host", self.host, "--port", str(self.port), *flags]
        environment = os.environ | {get_visible_devices_keyword(): visible_devices}
        for key in ("TLT_API_KEY", "TLT_ADMIN_API_KEY"):
            environment.pop(key, None)  # on loopback none is needed, and verl's ServerAdapter could show none
        with os.fdopen(file, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WITH_PARENT, *serve],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def check(self) -> None:
        """Raises ServerEnded: with the last line that it wrote."""
        if (code := self._process.poll()) is not None:
            said = self.log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise ServerEnded(f"tlt-server at {self.url} ended with exit code {code}: {said} ({self.log})")

    async def ready(self, client: AsyncClient) -> None:
        """Returns once it answers. Raises ServerEnded; TimeoutError: it did not within START_S."""
        until = time.monotonic() + START_S
        while not await client.health():
            self.check()
            if time.monotonic() > until:
                raise TimeoutError(f"tlt-server at {self.url} does not answer after {START_S:.0f} s: see {self.log}")
            await asyncio.sleep(0.5)
