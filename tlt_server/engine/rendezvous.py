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
    port, query = asked.port or 0, parse_qs(asked.query)
    rank, ranks = int(query["rank"][0]), int(query["world_size"][0])
    if ranks == 1:
        yield HashStore(), rank, ranks  # nobody to meet
    elif rank > 0:
        yield TCPStore(HOST, port, ranks, is_master=False, timeout=timeout), rank, ranks
    else:
        given = socket.create_server((HOST, port), backlog=128).detach()
        yield TCPStore(HOST, port, ranks, is_master=True, timeout=timeout, master_listen_fd=given), rank, ranks


register_rendezvous_handler(SCHEME, _meet)
