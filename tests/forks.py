"""`tlt-server`, and other programs, in forks of one process that has imported all they need, as a server's schedulers
are its forks: imports take longer than most tests.

What only a process of its own can show, its command line, its environment or its start, is shown by those that
`tlt_server.process` starts, as in tests/server/test_keys.py and test_link.py, and the demo.
"""

import atexit
import contextlib
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

FORKS = ForkServerContext()
"""For functions of tests in processes of their own, whose environment is that of the first fork."""
FORKS.set_forkserver_preload(["tests.imported"])


def on_ranks(main: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `main(rank, *arguments)` returns on each of two ranks."""
    with ProcessPoolExecutor(2, mp_context=FORKS) as pool:
        return [each.result() for each in [pool.submit(main, rank, *arguments) for rank in range(2)]]


class Fork(ForkServerProcess):
    """Speaks as `subprocess.Popen` does."""

    pid: int

    def poll(self) -> int | None:
        return self.exitcode

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.is_alive():
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if (code := self.exitcode) is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0)
        return code


def forked(
    argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, program: str | Path | None = None
) -> Fork:
    """`tlt-server ARGV` at the head of a process group of its own, its output behind what is in `log`. program: another
    one, a module or a file."""
    log.touch()
    process = Fork(target=_run, args=(argv, log, dict(os.environ) | dict(environment or {}), program))
    process.start()
    with contextlib.suppress(ProcessLookupError):  # it has ended
        while os.getpgid(process.pid) != process.pid:  # who kills the group finds it
            time.sleep(0.001)
    return process


def ran(argv: Sequence[str], log: Path, program: str | Path, environment: Mapping[str, str] | None = None) -> int:
    """Its exit code; who takes longer than any test should is killed, as by `subprocess.run`."""
    process = forked(argv, log, environment, program)
    try:
        return process.wait(300)
    finally:
        process.kill()


def _run(argv: Sequence[str], log: Path, environment: Mapping[str, str], program: str | Path | None) -> None:
    """In the fork."""
    os.setsid()
    with open(os.devnull, "rb") as nothing, log.open("ab") as output:
        for file, stream in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(file.fileno(), stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # uvicorn hands its number on to workers
    for name in os.environ.keys() - environment.keys():  # were all cleared, no process could be given a title
        del os.environ[name]
    os.environ.update(item for item in environment.items() if os.environ.get(item[0]) != item[1])
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    sys.argv = sys.orig_argv = ["tlt-server", *argv]
    try:
        if isinstance(program, Path):
            runpy.run_path(str(program), run_name="__main__")
        else:
            runpy.run_module(program or "tlt_server", run_name="__main__", alter_sys=program is not None)
    finally:
        atexit._run_exitfuncs()  # a fork of multiprocessing's leaves them out
