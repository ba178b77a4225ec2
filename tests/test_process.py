"""Child processes: the ports that they are given."""

import random
import socket
from pathlib import Path

from tlt_server.process import free_port


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
