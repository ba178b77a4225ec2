"""Child processes: the ports that they are given, and that they end with who started them."""

import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tlt_server.process import free_port, running

PARENT = """
import sys, time
from pathlib import Path
from tlt_server.process import running
with running(["http.server", "--bind", "127.0.0.1", "0"], Path(sys.argv[1])) as child, running(
    ["http.server", "--bind", "127.0.0.1", "0"], Path(sys.argv[1] + "2")
) as other:
    print(child.pid, other.pid, flush=True)
    time.sleep(60)
"""
"""Two children, of which one context is inside the other."""


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_children_end_with_whoever_is_told_to_end(told: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        parent.send_signal(told)
        assert parent.wait(20) in (128 + told, -told)
    assert not psutil.wait_procs(children, timeout=1)[1]


def test_whoever_minds_the_signal_meanwhile_goes_on_to(tmp_path: Path) -> None:
    """An event loop, whose handler outlives the first child."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with running(["http.server", "--bind", "127.0.0.1", "0"], tmp_path / "log"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with running(["http.server", "--bind", "127.0.0.1", "0"], tmp_path / "log"):
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_connection_is_given_a_port_that_a_server_is_about_to_take() -> None:
    """The kernel gave one to a connection of another process; the server that came to bind it ended."""
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(50):
        port = free_port()
        assert 10_000 <= port < first
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_two_processes_with_one_seed_get_different_ports() -> None:
    drawn = []
    for _ in range(2):
        random.seed(0)
        drawn.append([free_port() for _ in range(4)])
    assert drawn[0] != drawn[1]
