"""Servers that begin with all imported: see tests/forks.py."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.forks import forked
from tlt_server.process import Running, await_answer, free_port


@contextlib.contextmanager
def warm_server(flags: Sequence[str], log: Path) -> Iterator[str]:
    """As `running_server`: its URL."""
    with warm_process(flags, log) as server:
        yield server.url


@contextlib.contextmanager
def warm_process(flags: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Running]:
    """As `running_module` of `tlt-server serve`. ServerFailed: it ended, or did not answer in time."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    process = forked(["serve", "--host", "127.0.0.1", "--port", str(port), *flags], log, environment)
    try:
        await_answer(process, f"{url}/health", log, 180)
        yield Running(url, process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
