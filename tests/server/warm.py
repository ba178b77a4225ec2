"""Servers forked from one process that has imported SGLang, as their own schedulers are from them: imports take longer
than most tests.

What only a process of its own can show, its command line, its environment or its end by a signal, is shown by
`tlt_server.process`, as in test_keys.py, test_link.py and tests/fleet/test_real.py.
"""

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from tlt_server.process import Running, await_answer, free_port

ForkServerContext().set_forkserver_preload(["tests.server.imported"])


class Fork(ForkServerProcess):
    """Speaks as `subprocess.Popen` does."""

    def poll(self) -> int | None:
        return self.exitcode

    @property
    def returncode(self) -> int | None:
        return self.exitcode


@contextlib.contextmanager
def warm_server(flags: Sequence[str], log: Path) -> Iterator[str]:
    """As `running_server`: its URL."""
    with warm_process(flags, log) as server:
        yield server.url


@contextlib.contextmanager
def warm_process(flags: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Running]:
    """As `running_module` of `tlt-server serve`. ServerFailed: it ended, or did not answer in time."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    argv = ["serve", "--host", "127.0.0.1", "--port", str(port), *flags]
    log.touch()
    process = Fork(target=_serve, args=(argv, log, dict(os.environ) | dict(environment or {})))
    process.start()
    try:
        await_answer(process, f"{url}/health", log, 180)
        assert process.pid is not None
        yield Running(url, process.pid)
    finally:
        _end(process)


def _serve(argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """In the fork."""
    os.setsid()
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = sys.orig_argv = ["tlt-server", *argv]
    from tlt_server.cli import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()  # a fork of multiprocessing's leaves them out


def _end(process: Fork) -> None:
    """As `tlt_server.process` ends one."""
    assert process.pid is not None
    if process.is_alive():
        os.kill(process.pid, signal.SIGINT)
        process.join(15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
