"""A rollout server as a child process: started, waited for, ended, by whoever needs one for a while. And what any
process with large imports does at its start and end."""

import contextlib
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import httpx

from tlt_server.errors import ServerFailed


def free_port() -> int:
    """A TCP port of loopback that nobody has; if there is room below the range that the kernel gives to connections,
    any of which could be taken until a server binds. ServerFailed: a hundred are taken."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, given.read_text().split()) if given.exists() else (32768, 60999)  # Linux's default
    ports = range(10_000, first) or range(first, last + 1)
    # not from the module's own generator: a test may have seeded it, and its neighbour alike
    for port in random.SystemRandom().sample(ports, min(100, len(ports))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerFailed("no free TCP port found on 127.0.0.1: a hundred were tried")


class Running(NamedTuple):
    """A server that answers. Its processes form the group `pid`."""

    url: str
    pid: int


@contextlib.contextmanager
def running_server(arguments: Sequence[str], log: Path, *, start_timeout: float = 180) -> Iterator[str]:
    """Runs `tlt-server serve ARGUMENTS` on a free port of loopback, its output in `log`; yields its URL. Raises
    ServerFailed: it ended, or did not answer within `start_timeout` seconds."""
    with running_module(["tlt_server", "serve"], arguments, log, start_timeout=start_timeout) as server:
        yield server.url


@contextlib.contextmanager
def running_module(
    module: Sequence[str],
    arguments: Sequence[str],
    log: Path,
    *,
    start_timeout: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Runs a Python module that serves SGLang's HTTP, as `running_server`: its name, then words before flags."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [*module, "--host", "127.0.0.1", "--port", str(port), *arguments]
    with running(command, log, environment=environment) as server:
        await_answer(server, f"{url}/health", log, start_timeout)
        yield Running(url, server.pid)


@contextlib.contextmanager
def running(
    module: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a Python module with its flags, its output in `log`; what it started and left is ended with it. It has a
    process group of its own, so that Ctrl-C reaches it through this context alone; likewise SIGTERM, where nobody else
    minds it."""
    with _minding_termination():
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *module],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | (environment or {}),
            )
        try:
            yield process
        finally:
            _end(process)


@contextlib.contextmanager
def _minding_termination() -> Iterator[None]:
    """Inside, SIGTERM unwinds the stack as Ctrl-C does. By itself it ends a process at once, whose children go on."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _unwind)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _unwind:  # else somebody minds it by now
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _unwind(number: int, _frame: object) -> None:
    sys.exit(128 + number)


class Child(Protocol):
    """What `subprocess.Popen` says of the end of a process."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...


def await_answer(process: Child, url: str, log: Path, timeout: float) -> None:
    """Returns once `url` answers. ServerFailed: the process ended, or did not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    with httpx.Client(timeout=5) as client:  # one for all: making one takes longer than asking
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerFailed(f"the server ended with exit code {process.returncode}:\n{tail(log)}")
            with contextlib.suppress(httpx.TransportError):
                if client.get(url).status_code == 200:
                    return
            time.sleep(0.05)
    raise ServerFailed(f"the server did not answer within {timeout:.0f} s:\n{tail(log)}")


def tail(log: Path) -> str:
    """The last lines of a log: what a server said before it ended."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends it as Ctrl-C would; then whatever is left of the processes that it started, at once if told again."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For a process's imports, which make a million objects and drop none: looking for cycles among them takes a fifth
    of their time, and as much again in each full collection. Where they fail the process ends, and is to find all."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def ending() -> None:
    """For a process that has done its work: the interpreter looks through everything once less. What stayed frozen,
    extension modules would call a leak."""
    gc.unfreeze()
    gc.disable()
