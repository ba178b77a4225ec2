"""Where a server's ranks meet, on loopback: torch's own store listens on all addresses, whatever it is told."""

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch.distributed import HashStore, Store, TCPStore, register_rendezvous_handler

SCHEME = "tlt-loopback"
HOST = "127.0.0.1"
DEFAULT = timedelta(minutes=30)
"""torch's own, of a store."""


def loopback_store(port: int) -> str:
    """The `init_method` of ranks of one machine that meet at this port."""
    return f"{SCHEME}://{HOST}:{port}"


def _meet(url: str, timeout: timedelta = DEFAULT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    asked = urlsplit(url)
    query = {name: int(values[0]) for name, values in parse_qs(asked.query).items()}
    yield _store(asked.port or 0, query["rank"], query["world_size"], timeout), query["rank"], query["world_size"]


def _store(port: int, rank: int, ranks: int, timeout: timedelta) -> Store:
    if ranks == 1:
        return HashStore()  # nobody to meet
    if rank > 0:
        return TCPStore(HOST, port, ranks, is_master=False, timeout=timeout)
    listener = socket.create_server((HOST, port), backlog=128)
    return TCPStore(HOST, port, ranks, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


register_rendezvous_handler(SCHEME, _meet)
